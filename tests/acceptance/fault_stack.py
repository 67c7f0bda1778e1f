"""``cloister local`` from its parts, on an S3 server, with two reconcilers and wrong clocks."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import boto3
import httpx
import psutil
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from ray_job.contract.accelerators import CPU
from service.local.layout import make_data_directory, make_directories, take_lock
from service.local.processes import CHILD, end_everything, kill_child, marked_processes
from service.local.ray_head import free_ports
from service.local.stack import GUARD_TIMEOUT_S, Plan, guard_child, start
from service.local.supervisor import Child, Supervisor
from tests.acceptance.local_stack import REPOSITORY, LocalStack
from tests.s3_server import CREDENTIALS

STORE = "s3"
RECONCILERS = ("reconciler", "reconciler-2")
SERVICE = ("api", *RECONCILERS, "coordinator")


def wrong_clock(path: Path) -> dict[str, str]:
    """Return the variables that shift the clock of a Python process by the seconds in a file."""
    return {"PYTHONPATH": f"{Path(__file__).with_name('wrong_clock')}:{REPOSITORY}", "WRONG_CLOCK": str(path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan(Plan):
    """A plan whose services have further settings.

    Attributes:
        settings: the settings of each service.
    """

    settings: Mapping[str, Mapping[str, str]]

    def service_child(self, name: str) -> Child:
        """Return the child of a service; a second one of its kind ends with ``-2``."""
        child = Plan.service_child(self, name.removesuffix("-2"))
        return replace(
            child,
            name=name,
            environment={**child.environment, CHILD: name, **self.settings[name]},
            log=self.layout.log(name),
            before_restart=lambda: kill_child(self.layout.local_id, name),
        )


class FaultStack(LocalStack):
    """A local stack whose store, reconcilers and clocks can fail.

    Attributes:
        store_port: where the S3 server listens.
        coordinator_url: where jobs lease.
    """

    def __init__(self, directory: Path, model: Path) -> None:
        super().__init__(directory, model)
        ray_port, coordinator_port, self.store_port = free_ports(3)
        self.coordinator_url = f"http://127.0.0.1:{coordinator_port}"
        self._clocks = [directory / name for name in ("first-clock", "second-clock")]
        self._plan = FaultPlan(
            layout=self.layout,
            port=self._port,
            ray_port=ray_port,
            coordinator_port=coordinator_port,
            models_file=self._models_file,
            model_id="demo",
            offline=True,
            accelerator=CPU,
            settings={name: self._settings(name) for name in SERVICE},
        )
        self._supervisor, self._stopping = Supervisor(print), Event()
        self._thread = Thread(target=self._supervisor.run, args=[self._stopping])

    def start(self) -> None:
        """Start the stack with clocks that are right."""
        self.set_clocks(0, 0)
        make_data_directory(self.layout)
        lock = take_lock(self.layout.lock)
        make_directories(self.layout)
        self._supervisor.start(guard_child(self.layout, lock))
        os.close(lock)
        self._supervisor.start(self._plan.child(STORE, [sys.executable, "-m", "tests.s3_server", str(self.store_port)]))
        assert self._supervisor.wait_until(self._makes_bucket, what="S3", timeout_s=60, stopping=self._stopping)
        assert start(self._plan, self._supervisor, self._stopping, print) is not None
        self._supervisor.start(self._plan.service_child(RECONCILERS[1]))
        self._thread.start()

    def stop(self) -> None:
        """End all processes."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        end_everything(self.layout)
        self._supervisor.reap()
        self._supervisor.close_pipe("guard", timeout_s=GUARD_TIMEOUT_S)

    def set_clocks(self, first_s: int, second_s: int) -> None:
        """Shift the clocks of the processes that start from now on, by seconds.

        The first is that of a reconciler and the driver, the second that of the others. So they disagree.
        """
        for path, shift_s in zip(self._clocks, (first_s, second_s), strict=True):
            path.write_text(str(shift_s))

    def child(self, name: str) -> psutil.Process:
        """Return the process of a child."""
        return marked_processes(self.layout.local_id, child=name)[0]

    def jobs(self) -> dict[str, str]:
        """Return the status of each job that Ray was given, by its id."""
        headers = {"authorization": f"Bearer {self.layout.ray_token.read_text()}"}
        url = f"http://127.0.0.1:{self._plan.ray_port}/api/jobs/"
        answer = httpx.get(url, headers=headers, trust_env=False).raise_for_status()
        return {job["submission_id"]: job["status"] for job in answer.json() if job["submission_id"]}

    def _settings(self, name: str) -> dict[str, str]:
        first, second = map(wrong_clock, self._clocks)
        driver = " ".join(f"{variable}='{value}'" for variable, value in first.items())
        return {
            **CREDENTIALS,
            **(first if name == RECONCILERS[0] else second),
            "CLOISTER_OBJECT_STORE": f"s3://cloister/stack?endpoint_url={self._store_url}&region=us-east-1",
            "CLOISTER_JOB_ENTRYPOINT": f"env {driver} {sys.executable} -m ray_job",
        }

    @property
    def _store_url(self) -> str:
        return f"http://127.0.0.1:{self.store_port}"

    def _makes_bucket(self) -> bool:
        client = boto3.client(
            "s3",
            endpoint_url=self._store_url,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            config=Config(retries={"total_max_attempts": 1}),
        )
        try:
            client.create_bucket(Bucket="cloister")
        except BotoCoreError:
            return False
        finally:
            client.close()
        return True
