"""Routers over the instances of a `RayService`, and a supervisor that brings back the dead."""

import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from kvferry.cluster.ray_launcher import RayService
from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.cluster.serving.supervisor import Supervisor
from kvferry.proto.ids import InstanceId


class RayRouting:
    """An async context manager, inside which routers may be had.

    It ends before the service is closed: nobody starts while everybody stops.

    Args:
        service: has been started.
    """

    def __init__(self, service: RayService) -> None:
        self._service = service
        self._supervisor = Supervisor(service.start_again, service.leave, self._join)
        self._routers: list[Router] = []

    async def __aenter__(self) -> "RayRouting":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._supervisor.close()

    @contextlib.asynccontextmanager
    async def router(self, settings: RouterSettings) -> AsyncIterator[Router]:
        """Yield a started router; an instance that dies is started again, and joins."""
        service = self._service
        router = Router(
            coordinator=service.coordinator,
            engines={i.info.instance_id: i.link for i in service.instances},
            identity_digest=service.identity.digest(),
            scheme=service.scheme,
            settings=settings,
            on_death=self._supervisor.died,
        )
        await router.start()
        self._routers.append(router)
        try:
            yield router
        finally:
            self._routers.remove(router)
            await router.close()

    def _join(self, instance_id: InstanceId, link: EngineLink) -> None:
        for router in self._routers:
            router.join(instance_id, link)
