"""Ctrl-C while a program imports its modules."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLOW = """
import os, sys, time
os.write(1, b"importing\\n")  # past Python's buffer
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("a KeyboardInterrupt reached the module", file=sys.stderr)
    raise
"""


def popen(arguments, path, **kwargs):
    paths = os.pathsep.join([str(path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment, **kwargs)  # fmt: skip


@pytest.mark.parametrize(
    "name, module, arguments",
    [
        ("nanovllm", "typer", ["-m", "nanovllm", "--help"]),
        ("nanovllm", "torch", ["-m", "nanovllm", "kernels", "list"]),
        ("example.py", "torch", [str(ROOT / "example.py")]),
        ("bench.py", "torch", [str(ROOT / "bench.py"), "--device", "cpu"]),
        ("test_custom_kernels.py", "torch", [str(ROOT / "test_custom_kernels.py")]),
    ],
)
def test_a_program_that_is_interrupted_while_it_imports_says_one_line(name, module, arguments, tmp_path):
    (tmp_path / f"{module}.py").write_text(SLOW)
    process = popen(arguments, tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err.strip()) == (130, f"{name}: interrupted")


WAITS = SLOW.replace("time.sleep(600)", "sys.stdin.readline()")
USERS = """
import atexit, signal
atexit.register(print, "at exit")
try:
    {before}
    {engine}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.raise_signal(signal.SIGINT)
finally:
    print("cleaned up")
"""
ENGINE, KERNELS = "from nanovllm import LLM, SamplingParams", "from nanovllm.kernels import rms_norm"
HANDLES = "signal.signal(signal.SIGINT, lambda *_: exit('the script has a handler'))"
ONE_LINE = "run.py: interrupted"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent")
@pytest.mark.parametrize("engine", [ENGINE, KERNELS])
@pytest.mark.parametrize("options, before, code, said", [
    ([], "pass", -signal.SIGINT, ONE_LINE),
    ([], "print('before the import')", -signal.SIGINT, ONE_LINE),  # its output waits in Python's buffer
    ([], HANDLES, 1, "the script has a handler"),
    ([], "import framework", -signal.SIGINT, "KeyboardInterrupt"),
    (["-S"], "pass", -signal.SIGINT, ONE_LINE),  # nothing has imported importlib
])  # fmt: skip
def test_a_users_script_that_is_interrupted_while_it_imports_cleans_up(options, before, code, said, engine, tmp_path):
    """The code after an interrupt that nothing catches is Python's own, which a shell shows as 130."""
    (tmp_path / "torch.py").write_text(WAITS)
    (tmp_path / "framework.py").write_text(engine)
    (tmp_path / "run.py").write_text(USERS.format(before=before, engine=engine))
    process = popen([*options, str(tmp_path / "run.py")], tmp_path, stdin=subprocess.PIPE)
    printed = ""
    while (line := process.stdout.readline()) != "importing\n":
        printed += line
    for _ in range(1 if before == HANDLES else 2):  # people press twice
        process.send_signal(signal.SIGINT)
    out, err = process.communicate("\n", timeout=300)
    assert code == process.returncode and said in err.strip().splitlines()
    assert ("Traceback" in err) == (said == "KeyboardInterrupt")
    assert "reached the module" not in err
    assert ("before the import" in printed + out) == before.startswith("print")
    assert out.endswith("cleaned up\nat exit\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent")
@pytest.mark.parametrize("engine", [ENGINE, KERNELS])
def test_a_script_may_catch_the_interrupt_of_its_import_and_what_it_raises_later_is_shown_as_ever(engine, tmp_path):
    (tmp_path / "torch.py").write_text(WAITS)
    (tmp_path / "run.py").write_text(f"""
try:
    {engine}
except KeyboardInterrupt as e:
    assert type(e) is KeyboardInterrupt
    print("stopped")
raise KeyboardInterrupt("another")
""")
    process = popen([str(tmp_path / "run.py")], tmp_path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("\n", timeout=300)
    assert out == "stopped\n" and "Traceback" in err and err.endswith("KeyboardInterrupt: another\n")


NOTEBOOK = """
import IPython

def run_cell(text):
    try:
        exec(text, {"__name__": "__main__"})
    except KeyboardInterrupt:
        print("the cell is interrupted", flush=True)

run_cell("from nanovllm import LLM")
run_cell("import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent")
@pytest.mark.parametrize("options, program, said", [
    (["-i"], "from nanovllm import LLM", []),
    ([], NOTEBOOK, ["the cell is interrupted", "True"]),
    ([], f"import IPython\nexec({NOTEBOOK!r}, {{'__name__': '__main__', '__file__': 'run.py'}})",
     ["the cell is interrupted", "True"]),
])  # fmt: skip
def test_at_a_prompt_and_in_a_notebook_an_interrupt_waits_for_pytorch(options, program, said, tmp_path):
    (tmp_path / "torch.py").write_text(WAITS + 'print("imported", flush=True)\n')
    (tmp_path / "IPython.py").write_text("")
    (tmp_path / "run.py").write_text(program)
    process = popen([*options, str(tmp_path / "run.py")], tmp_path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("\n", timeout=300)
    assert out.split("\n")[:-1] == ["imported", *said] and "reached the module" not in err, err
    assert process.returncode == 0 if said else "\nKeyboardInterrupt\n" in err


def test_a_users_script_gets_a_keyboard_interrupt_once_the_engine_is_imported(tmp_path):
    (tmp_path / "nanovllm_is_imported.py").write_text(USERS.format(before="import torch", engine=ENGINE))
    process = popen([str(tmp_path / "nanovllm_is_imported.py")], tmp_path)
    out, err = process.communicate(timeout=600)
    assert err.strip().endswith("KeyboardInterrupt") and "raise_signal" in err and "AssertionError" not in err


@pytest.mark.parametrize("loaded", [False, True])
def test_an_interrupt_after_the_imports_is_a_keyboard_interrupt(loaded, tmp_path):
    (tmp_path / "torch.py").write_text("")
    program = f"""
{"import torch" if loaded else ""}
import os, signal
from nanovllm.console import run_program

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        print("kept what there is")
        raise

run_program("program", main)
"""
    process = popen(["-c", program], tmp_path)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, "kept what there is\n", "\nprogram: interrupted\n")


def test_a_background_job_of_a_shell_ignores_ctrl_c_still(tmp_path):
    (tmp_path / "typer.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(1)\nraise SystemExit(7)"
    )
    process = popen(["-m", "nanovllm"], tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 7


@pytest.mark.parametrize("caught", [False, True])
def test_an_interrupt_of_a_command_is_said_once(caught):
    program = f"""
import os, signal, typer
from nanovllm.console import run_program

app = typer.Typer()

@app.command()
def command():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        if not {caught}:
            raise
        print("stopped early", flush=True)
        raise typer.Exit(130)

run_program("program", app)
"""
    process = popen(["-c", program], ROOT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (
        (130, "stopped early\n", "") if caught else (130, "", "\nprogram: interrupted\n")
    )


@pytest.mark.parametrize("cuda, end, expected", [
    (False, "return 3", (3, "thread\nexit\n")),
    (False, "sys.exit(4)", (4, "thread\nexit\n")),
    (True, "return 3", (3, "thread\nexit\ndestroyed\n")),
    (False, "raise KeyError", (1, "thread\nexit\ndestroyed\n")),
])  # fmt: skip
def test_a_program_ends_without_destroying_what_it_has_loaded_unless_profilers_may_wait_for_that(
    cuda, end, expected, tmp_path
):
    (tmp_path / "torch.py").write_text(f"""
class cuda:
    is_initialized = staticmethod(lambda: {cuda})

class Loaded:
    def __del__(self):
        print("destroyed", flush=True)

loaded = Loaded()
loaded.itself = loaded
""")
    program = f"""
from nanovllm.console import run_program

def main():
    import atexit, sys, threading, time, torch
    atexit.register(print, "exit")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    {end}

run_program("program", main)
"""
    process = popen(["-c", program], tmp_path)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == expected and ("KeyError" in err) == ("KeyError" in end)


@pytest.mark.parametrize("torch_first", [False, True])
def test_a_quick_exit_loses_no_files_and_leaves_none_behind(torch_first, tmp_path):
    """Functions that were registered for the exit before the program began are called, those of PyTorch for example."""
    (tmp_path / "torch.py").write_text(
        "import atexit, multiprocessing.util, tempfile\nfolder = tempfile.TemporaryDirectory()\n"
        "atexit.register(print, 'exit', flush=True)\n"
    )
    program = f"""
{"import torch" if torch_first else ""}
from nanovllm.console import run_program

def main():
    global log
    import gc, multiprocessing, time, torch
    log = open("log.txt", "w")
    log.write("kept")
    if not {torch_first}:
        gc.freeze()  # the interpreter does not destroy what is frozen
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,), daemon=True)
    child.start()
    print(child.pid, torch.folder.name)
    return 3

run_program("program", main)
"""
    process = popen(["-c", program], tmp_path, cwd=tmp_path)
    number, folder, *rest = process.communicate(timeout=300)[0].split()
    assert (process.returncode, rest) == (3, ["exit"])
    assert (tmp_path / "log.txt").read_text() == "kept" and not os.path.exists(folder)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


@pytest.mark.parametrize("presses, expected", [(1, (0, "begun\nended\n")), (2, (130, "begun\n"))])
def test_ctrl_c_at_the_exit_says_nothing(presses, expected, tmp_path):
    """The exit goes on, with all that is called there; pressed again, Ctrl-C ends it."""
    program = f"""
from nanovllm.console import run_program

def slow_end():
    import os, signal
    print("begun", flush=True)
    for _ in range({presses}):
        os.kill(os.getpid(), signal.SIGINT)
    print("ended", flush=True)

def main():
    import atexit
    atexit.register(slow_end)

run_program("program", main)
"""
    process = popen(["-c", program], tmp_path)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (*expected, "")
