from kvferry.cluster.sim.blocking import Condition, Event, Executor, wait
from kvferry.cluster.sim.world import Process, World


def test_tasks_run_in_the_order_of_their_times_and_time_passes_only_then() -> None:
    world, seen = World(1), list[tuple[str, float]]()
    for name, after_s in (("late", 3.0), ("early", 1.0)):
        world.spawn(lambda n=name: seen.append((n, world.now_s)), after_s=after_s)  # type: ignore[misc]
    world.run()
    assert seen == [("early", 1.0), ("late", 3.0)]


def test_of_tasks_at_one_moment_the_seed_chooses() -> None:
    def order(seed: int) -> list[int]:
        world, seen = World(seed), list[int]()
        for number in range(6):
            world.spawn(lambda n=number: seen.append(n))  # type: ignore[misc]
        world.run()
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10


def test_a_killed_process_never_runs_again_and_others_hear_of_its_end() -> None:
    world, seen = World(1), list[str]()
    process = Process("victim")
    process.at_end.append(lambda: seen.append("ended"))

    def live() -> None:
        try:
            world.sleep(2.0)
        finally:
            seen.append("never")

    world.spawn(live, process)
    world.spawn(lambda: world.kill(process), after_s=1.0)
    world.run()
    assert seen == ["ended"]


def test_a_paused_process_goes_on_later_as_if_nothing_had_been() -> None:
    world, seen = World(1), list[float]()
    process = Process("sleeper")

    def live() -> None:
        world.sleep(1.0)
        seen.append(world.now_s)

    world.spawn(live, process)
    world.spawn(lambda: world.pause(process, 5.0), after_s=0.5)
    world.run()
    assert seen == [5.5]


def test_every_process_has_its_own_clock() -> None:
    world, seen = World(1), list[float]()
    process = Process("fast", clock_offset_s=100.0, clock_rate=2.0)
    world.spawn(lambda: seen.append(world.clock_s()), process, after_s=3.0)
    world.run()
    assert seen == [106.0]


def test_what_a_task_does_not_handle_ends_the_run() -> None:
    world = World(1)

    def fail() -> None:
        raise ZeroDivisionError

    world.spawn(fail)
    try:
        world.run()
    except ZeroDivisionError:
        return
    raise AssertionError("nothing was raised")


def test_a_condition_wakes_those_who_wait_and_lets_them_go_at_their_deadline() -> None:
    world, seen = World(1), list[tuple[str, bool, float]]()
    condition = Condition(world)

    def waits(name: str, timeout_s: float) -> None:
        seen.append((name, condition.wait(timeout_s), world.now_s))

    world.spawn(lambda: waits("woken", 9.0))
    world.spawn(lambda: waits("late", 1.0))
    world.spawn(condition.notify_all, after_s=2.0)
    world.run()
    assert seen == [("late", False, 1.0), ("woken", True, 2.0)]


def test_an_executor_runs_as_many_at_once_as_it_has_workers() -> None:
    world, ended = World(1), list[float]()

    def work() -> str:
        world.sleep(1.0)
        ended.append(world.now_s)
        return "done"

    def submit() -> None:
        executor = Executor(world, 2)
        futures = [executor.submit(work) for _ in range(3)]
        assert not wait([futures[0]], timeout=0.5).done
        assert futures[2].result() == "done"

    world.spawn(submit)
    world.run()
    assert ended == [1.0, 1.0, 2.0]


def test_an_event_that_is_set_lets_everybody_through() -> None:
    world, seen = World(1), list[bool]()
    event = Event(world)
    world.spawn(lambda: seen.append(event.wait(1.0)))
    world.spawn(event.set, after_s=2.0)
    world.spawn(lambda: seen.append(event.wait(1.0)), after_s=3.0)
    world.run()
    assert seen == [False, True]
