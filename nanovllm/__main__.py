"""The program `nanovllm`, also `python -m nanovllm`."""

from nanovllm.early_exit import leave_at_once


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback while the commands are imported, too."""
    leave_at_once("nanovllm")
    from nanovllm.cli import main as run

    run(quick_exit=True)


if __name__ == "__main__":
    main()
