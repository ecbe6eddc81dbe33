"""The end of a group of ranks: after its CUDA graphs, and whatever NCCL waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from nanovllm.distributed.group import Group
from nanovllm.distributed.processes import Processes

logger = logging.getLogger(__name__)

_ABORT_SECONDS = 10.0


def abort(groups: Sequence[Group]) -> None:
    """End the collectives of groups that have lost a rank, so that the threads that wait in them go on."""
    for group in groups:
        try:
            group.process_group.abort()
        except Exception:  # it was aborted before, or a rank's end has broken it
            logger.debug("a group was not aborted", exc_info=True)


def end_groups(processes: Processes, groups: Sequence[Group]) -> None:
    """End the graphs of groups and, unless a rank has failed, their connections.

    After a failure another thread aborts: NCCL may wait then for a GPU that waits for a rank that is gone.
    """
    for group in groups:
        group.reset_graphs()
    if processes.failure is not None:
        return
    thread = threading.Thread(target=abort, args=(groups,), name="end of a group", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the program ends: Python starts no thread any more
        abort(groups)
        return
    thread.join(_ABORT_SECONDS)
    if thread.is_alive():
        logger.warning("the connections between the ranks have not ended for %g s", _ABORT_SECONDS)


def leave(processes: Processes, groups: list[Group]) -> None:
    """End the other ranks, which let go of this one's memory, and then the connections to them."""
    processes.close()
    end_groups(processes, groups)
    groups.clear()  # a group refers to `processes`, these refer to the list: the cycle would keep the group's buffers
