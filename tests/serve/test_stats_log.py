"""The line with rates and the queue."""

import logging
import re

import pytest

from nanovllm.cli.serve_options import ReportOptions
from nanovllm.serve.log_setup import logging_thread
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.stats_log import StatsLog
from tests.serve.running import RunningServer, slow_client
from tests.waiting import wait_until

ASKED = dict(prompt="hello there", max_tokens=25, ignore_eos=True, n=2)


@pytest.fixture(scope="module")
def server(model_path):
    """One that logs no such lines itself."""
    with RunningServer(model_path, ServeOptions(stats_interval=0.0)) as running:
        yield running


def test_rates_are_of_the_time_since_the_last_line(server):
    times = iter([100.0, 110.0, 130.0, 140.0, 141.0])
    log = StatsLog(server.engine, server.server.service.metrics, lambda: next(times))
    usage = server.post("/v1/completions", **ASKED)["usage"]
    assert usage["completion_tokens"] == 50
    wait_until(lambda: not server.engine.stats.has_work)
    prompt = f"{usage['prompt_tokens'] / 10:.1f}"
    assert re.fullmatch(
        rf"prompt {prompt} tokens/s, output 5\.0 tokens/s, 0 running, 0 waiting, KV cache 0\.0% used", log.line()
    )
    assert log.line().startswith("prompt 0.0 tokens/s, output 0.0 tokens/s"), "the work has ended"
    assert log.line() is None
    server.post("/v1/completions", prompt="x", max_tokens=4)
    assert "output 4.0 tokens/s" in log.line()


def test_a_server_logs_while_it_works(model_path, caplog):
    caplog.set_level(logging.INFO, "nanovllm.serve.stats")
    lines = lambda: [r.getMessage() for r in caplog.records if r.name == "nanovllm.serve.stats"]  # noqa: E731
    with RunningServer(model_path, ServeOptions(stats_interval=0.02), slow_client(model_path)) as running:
        running.post("/v1/completions", **ASKED)
        wait_until(lambda: lines() and lines()[-1].startswith("prompt 0.0 tokens/s, output 0.0 tokens/s, 0 running"))
    said = lines()
    assert any(re.search("output [1-9].* 2 running, 0 waiting, KV cache [0-9.]+% used", line) for line in said), said


def test_no_lines_without_an_interval(server, caplog):
    caplog.set_level(logging.INFO, "nanovllm.serve.stats")
    server.post("/v1/completions", **ASKED)
    assert not [record for record in caplog.records if record.name == "nanovllm.serve.stats"]


def test_the_option_and_the_level():
    assert not ReportOptions().disable_log_stats and ServeOptions().stats_interval == 10
    with pytest.raises(ValueError, match="stats_interval=-1: must be a number of seconds of at least 0"):
        ServeOptions(stats_interval=-1)
    logger = logging.getLogger("nanovllm.serve.stats")
    for level, shown in ((logging.WARNING, True), (logging.ERROR, False), (logging.DEBUG, True)):
        with logging_thread(level, False, False):
            assert logger.isEnabledFor(logging.INFO) is shown
