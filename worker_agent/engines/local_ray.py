"""A Ray cluster of this process alone, where it is not already in one."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least is 75 MiB; token ids are all that goes through it
# Ray listens to the network wherever clusters are allowed; the name is from the systems where they are not by default.
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class LocalRay:
    """Ray on the loopback, without dashboard and usage statistics; it ends with this process.

    After a SIGKILL two agents of Ray's, which hold nothing, take a minute of their own to end. Its sockets and logs lie
    in a temporary folder that `stop` removes. A process that is in a cluster already stays in it, and `stop` leaves it
    alone.
    """

    def __init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._folder: str | None = None
        if ray.is_initialized():
            return
        self._folder = tempfile.mkdtemp(prefix="ray-")
        atexit.register(self.stop)
        try:
            with _sigterm_as_it_was(), _on_one_machine():
                ray.init(
                    address="local",
                    num_cpus=0,  # no worker is kept ready
                    num_gpus=0,  # whoever starts an actor tells it its devices
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="WARNING",
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=self._folder,
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the cluster if it was started here. Nothing happens the second time."""
        import ray

        if self._folder is not None:
            atexit.unregister(self.stop)
            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


@contextlib.contextmanager
def _sigterm_as_it_was() -> Iterator[None]:
    """Ray takes SIGTERM for itself; what it does then is the host process's to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _on_one_machine() -> Iterator[None]:
    """Ray's processes take this from the environment, this one may have read it long ago."""
    from ray._private import ray_constants

    before, clusters = os.environ.get(_CLUSTERS), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_CLUSTERS] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        if before is None:
            del os.environ[_CLUSTERS]
        else:
            os.environ[_CLUSTERS] = before
