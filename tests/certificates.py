"""Real certificates in a folder, as an operator would lay them out."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

from kvferry.proto.credentials import DEFAULT_SERVER_NAME, Credentials

TOKEN = "a-token-of-tests"


@dataclass
class CertificateFolder:
    """An authority, and the files that it has issued."""

    folder: Path
    authority: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.authority.cert_pem.write_to_path(self.ca)

    @property
    def ca(self) -> Path:
        """The authority's own certificate."""
        return self.folder / "ca.crt"

    def issue(self, name: str = DEFAULT_SERVER_NAME, *, days: int = 1) -> tuple[Path, Path]:
        """Write a certificate for a name, as `name.crt` and `name.key`, and return both paths.

        A negative number of days makes one that has expired.
        """
        issued = self.authority.issue_cert(
            name,
            not_before=datetime.now(UTC) - timedelta(days=30),
            not_after=datetime.now(UTC) + timedelta(days=days),
        )
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    def token_file(self, token: str = TOKEN) -> Path:
        path = self.folder / "token"
        path.write_text(f"{token}\n")
        return path

    def mutual(self, name: str = DEFAULT_SERVER_NAME, /, **changes: Any) -> Credentials:
        """Credentials of a peer that shows a certificate and asks for one."""
        certificate, key = self.issue(name)
        values: dict[str, Any] = {"certificate": certificate, "key": key, "ca": self.ca}
        return Credentials(**(values | changes))

    def trusting(self, **changes: Any) -> Credentials:
        """Credentials of a client that has no certificate."""
        return Credentials(ca=self.ca, **changes)

    def become(self, other: "CertificateFolder") -> None:
        """Put another authority, and a certificate of it, where ours were."""
        certificate, key = other.issue()
        for new, old in ((certificate, "kvferry.crt"), (key, "kvferry.key"), (other.ca, "ca.crt")):
            (self.folder / old).write_bytes(new.read_bytes())
