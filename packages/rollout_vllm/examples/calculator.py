"""Multi-turn episodes with a calculator, for models that write tool calls in Qwen3's format.

    python calculator.py http://127.0.0.1:8000 Qwen/Qwen3-0.6B "What is 4821 * 377 - 12?"

The rollout function is `calculator(...)`; the rest is the command line. A trainer uses only the function: an episode's
`response_mask` marks the tokens that the policy sampled, and `log_probs` holds their log-probs.
"""

import argparse
import ast
import asyncio
import json
import operator
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_vllm import Endpoint, Episode, Request, RolloutClient, SamplingConfig, run_episodes

SYSTEM = """Use the calculator for every calculation. Call it like this:
<tool_call>
{"name": "calculator", "arguments": {"expression": "12 * 7"}}
</tool_call>"""
OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


def calculator(
    encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], *, end_of_call: int, max_turns: int = 4
) -> Callable[[Episode], Awaitable[None]]:
    """The rollout function. end_of_call: the id of the token that ends a call (`</tool_call>`)."""

    async def rollout(episode: Episode) -> None:
        for _ in range(max_turns):
            turn = await episode.generate(stop_token_ids=(end_of_call,))
            if turn.response_ids[-1:].tolist() != [end_of_call]:
                return  # the model gave an answer or ran out of tokens
            result = answer_call(decode(turn.response_ids))
            context = encode(
                f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            if len(context) >= episode.num_tokens_left:
                return
            episode.add_context(context)  # masked out of the loss
            episode.data["num_calls"] = episode.data.get("num_calls", 0) + 1

    return rollout


def answer_call(turn: str) -> str:
    """The calculator's result for a turn that ends in a call."""
    call = re.search(r"<tool_call>\s*(.*?)\s*(?:</tool_call>)?\s*$", turn, re.DOTALL)
    try:
        expression = json.loads(call[1] if call else "")["arguments"]["expression"]
        return f"{evaluate(ast.parse(str(expression)[:200], mode='eval').body):.12g}"
    except Exception as error:  # the model gets to read its mistake
        return f"error: {type(error).__name__}"


def evaluate(node: ast.expr) -> float:
    """Evaluate an expression of numbers, signs, parentheses and + - * / %."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return float(OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right)))
    raise ValueError("the calculator does not support this expression")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", help="the served model's folder or Hub name, for its tokenizer")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    messages = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}] for q in args.questions]
    requests = [
        Request(
            prompt_id=question,
            prompt_ids=tokenizer.encode(
                tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True),
                add_special_tokens=False,
            ),
        )
        for question, message in zip(args.questions, messages, strict=True)
    ]
    function = calculator(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        tokenizer.decode,
        end_of_call=tokenizer.convert_tokens_to_ids("</tool_call>"),
    )

    async def generate() -> None:
        client = RolloutClient([Endpoint(args.url, os.environ.get("VLLM_API_KEY"))])
        sampling = SamplingConfig(n=args.n, max_tokens=args.max_tokens)
        for group in await run_episodes(client, requests, function, sampling):
            for result in group.samples:
                own = sum(result.response_mask)
                print(f"\n{group.prompt_id} #{result.sample_index}: {result.num_turns} turns, {own} sampled tokens")
                print(tokenizer.decode(result.response_ids))
        await client.aclose()

    asyncio.run(generate())


if __name__ == "__main__":
    main()
