"""What `nanovllm generate` does before the first token, and what it leaves to those who need it."""

import subprocess
import sys

# Each takes a tenth of a second or more to import.
DEAR = (
    "transformers", "rich", "triton", "huggingface_hub", "gguf", "sympy", "scipy", "PIL", "torch._dynamo",
    "torch._inductor",
)  # fmt: skip
_USED = "awaited_answer", "command_group", "foreign_options", "number_options", "option_records"
# The modules of other commands are imported when those are called.
COMMANDS = [f"nanovllm.cli.{name}" for name in _USED]


def test_generate_imports_nothing_dear(smollm2_path) -> None:
    code = f"""
import sys, gc
from nanovllm.cli import main
sys.argv = ["nanovllm", "generate", "The capital of France is", "--max-tokens", "2", "--temperature", "0",
            "--model", {str(smollm2_path)!r}]
try:
    main()
except SystemExit as e:
    assert not e.code
print("collector:", gc.isenabled(), gc.get_freeze_count() > 10_000)
print("commands:", sorted(name for name in sys.modules if name.startswith("nanovllm.cli.")))
print("dear:", [name for name in {DEAR} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " Paris" in done.stdout, done.stderr
    assert f"collector: True True\ncommands: {COMMANDS}\ndear: []" in done.stdout
