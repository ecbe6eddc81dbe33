"""Generate text: three chat prompts, or one of yours.

    python example.py    # SmolLM2-135M-Instruct, downloaded once
    python example.py --prompt "Why is the sky blue?" --max-tokens 200
    python example.py --model ~/models/Qwen3-0.6B

A GPU is used if there is one.
"""

import argparse
import time

from nanovllm.arguments import name_options
from nanovllm.console import StatusLine, run_program, say, show_warnings
from nanovllm.wording import counted

PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences what a GPU does.",
    "Give three tips for a good night's sleep.",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a Hugging Face directory, a hub id or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--prompt", action="append", help="a prompt; repeatable (default: three examples)")
    parser.add_argument("--max-tokens", type=int, default=160, help="most tokens in an answer (default: 160)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for always the most likely token")
    parser.add_argument(
        "--use-custom-kernels", action=argparse.BooleanOptionalAction, default=None,
        help="custom kernels, or every op's PyTorch reference (default: custom)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    show_warnings()
    started = time.perf_counter()
    status = StatusLine()
    status.show("Loading ...", timed=True)
    try:
        from nanovllm import LLM, SamplingParams
        from nanovllm.weights.demo_model import demo_model_path

        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0)
        model = args.model or demo_model_path()
        llm = LLM(model, use_custom_kernels=args.use_custom_kernels)
        prompts = args.prompt or PROMPTS
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        has_template = llm.tokenizer is not None and llm.tokenizer.chat_template
        if has_template:
            llm.chat_prompt(conversations[0])  # imports Jinja, while the status line counts the seconds
    except (ValueError, FileNotFoundError) as error:
        name_options(error, {name: "--" + name.replace("_", "-") for name in vars(args)})
        raise
    finally:
        status.clear()
    print(f"Loaded {model} in {time.perf_counter() - started:.1f} s")

    try:
        outputs = llm.chat(conversations, params) if has_template else llm.generate(prompts, params)
    except KeyboardInterrupt as interrupt:
        for prompt, output in zip(prompts, getattr(interrupt, "outputs", [])):
            print(f"\n> {prompt}\n{output['text']} [cut short]")
        raise

    for prompt, output in zip(prompts, outputs):
        print(f"\n> {prompt}\n{output['text']}")
    num_prompt = sum(len(o.prompt_token_ids) for o in outputs)
    num_output = sum(len(o["token_ids"]) for o in outputs)
    first = min(o.metrics.time_to_first_token for o in outputs)
    seconds = max(o.metrics.total_time for o in outputs)
    say(
        f"\n{counted(num_prompt, 'prompt token')}, {counted(num_output, 'output token')},"
        f" first token after {first:.2f} s, {num_output / seconds:.0f} output tokens/s; device: {llm.device_name};"
        f" kernels: {llm.kernels.summary()}"
    )


if __name__ == "__main__":
    run_program("example.py", main)
