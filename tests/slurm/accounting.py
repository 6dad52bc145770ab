"""The accounts of a lab, as production sites keep them: MariaDB, slurmdbd and a QOS with limits.

Both write inside the lab's directory alone. MariaDB listens on a socket there, on no port, and lets
in none but the system's root.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.daemons import Daemon

NEEDED = ("mariadb-install-db", "mariadbd", "slurmdbd", "sacctmgr")
DATABASE = (  # small, and nothing of it has to survive the machine
    "--no-defaults",
    "--user=root",
    "--skip-networking",
    "--skip-name-resolve",
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=4M",
    "--innodb-autoextend-increment=1",
    "--innodb-flush-method=nosync",
    "--skip-innodb-doublewrite",
    "--sync-frm=0",
    "--innodb-lock-wait-timeout=900",  # slurmdbd asks for it
)
ACCOUNTS = """\
Cluster - 'lab'
Parent - 'root'
Account - 'research'
Parent - 'research'
User - 'root':DefaultAccount='research'
"""  # every association has the QOS `normal`


@dataclass(frozen=True)
class Accounting:
    """MariaDB and slurmdbd of the lab in `directory`, whose commands `command` runs."""

    directory: Path
    command: Callable[..., str]

    def write_configuration(self, port: int) -> dict[str, str]:
        """Write slurmdbd.conf, and return what slurm.conf has to say of it."""
        munge = f"{self.directory}/run/munge.sock"
        settings = {
            "DbdHost": "localhost",
            "DbdPort": str(port),
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={munge}",
            "PidFile": f"{self.directory}/run/slurmdbd.own",  # `Daemon` has its own
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": "root",
            "StorageLoc": "accounts",
        }
        conf = self.directory / "etc/slurmdbd.conf"  # slurmdbd looks for it beside SLURM_CONF
        conf.touch(mode=0o600)
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        return {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "localhost",
            "AccountingStoragePort": str(port),
            "AccountingStoragePass": munge,
            "AccountingStorageEnforce": "associations,limits,qos",
        }

    def start(self) -> None:
        """Start both, with the cluster, its account and the user root; munged has to run."""
        data = self.directory / "database"
        self.command("mariadb-install-db", *DATABASE, f"--datadir={data}", "--skip-test-db")
        database = Daemon(self.directory, "mariadbd")
        database.start("mariadbd", *DATABASE, f"--datadir={data}", f"--socket={self._socket}")
        database.wait_until_ready(self._database_listens)

        self.start_slurmdbd()
        accounts = self.directory / "etc/accounts"
        accounts.write_text(ACCOUNTS)
        self._sacctmgr("load", f"file={accounts}")  # one call for each takes longer

    def start_slurmdbd(self) -> None:
        """Start slurmdbd and wait until it answers."""
        variables = {
            "SLURM_CONF": str(self.directory / "etc/slurm.conf"),
            # The only way to tell it: slurmdbd.conf has no option for the database's socket.
            "MYSQL_UNIX_PORT": self._socket,
        }
        slurmdbd = Daemon(self.directory, "slurmdbd")
        slurmdbd.start("slurmdbd", "-D", **variables)
        slurmdbd.wait_until_ready(self._slurmdbd_answers)

    def limit_submissions(self, count: int) -> None:
        """Set how many jobs a user may have; slurmctld knows of it when this returns."""
        limit = f"MaxSubmitJobsPerUser={count}"
        self._sacctmgr("modify", "qos", "normal", "set", limit)

    def _sacctmgr(self, *arguments: str) -> str:
        return self.command("sacctmgr", "--immediate", *arguments)

    @property
    def _socket(self) -> str:
        return f"{self.directory}/run/mariadbd.sock"

    def _database_listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self._socket) == 0

    def _slurmdbd_answers(self) -> bool:
        try:
            return bool(self._sacctmgr("show", "qos"))
        except RuntimeError:
            return False
