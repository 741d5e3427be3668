"""A server that responds like vLLM without generating: a script that uses only the standard library.

    python -m benchmarks.rollout.dummy_server --tokens 512 --tokens-per-s 20

It prints its port. It answers every POST to /v1/completions after tokens / tokens_per_s seconds with `n` choices, with
token ids and log-probs: as this package's servers answer its client, with `--lists` as vLLM answers others. Each
response is rendered once, so that the server uses little CPU.
"""

import argparse
import asyncio
import base64
import json
import random
from array import array


def choice(num_tokens: int, num_prompt_tokens: int | None, chooser: random.Random) -> dict[str, object]:
    """One choice as vLLM 0.32 sends it for logprobs=0 and return_token_ids.

    num_prompt_tokens: None for the choice of a server of this package.
    """
    ids = [chooser.randrange(151936) for _ in range(num_tokens)]
    values = [-chooser.expovariate(0.5) for _ in ids]
    if num_prompt_tokens is None:  # `packed_choice` of servers/fast/buffering, without numpy; little-endian hosts only
        numbers = {"token_ids": array("i", ids).tobytes(), "log_probs": array("f", values).tobytes()}
        nothing = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"))
        return nothing | {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "policy_versions": [[0, num_tokens]],
            "packed": {name: base64.b64encode(row).decode() for name, row in numbers.items()},
        }
    names = [f" word{i}" for i in ids]
    return {
        "index": 0,
        "text": "abcd" * num_tokens,
        "logprobs": {
            "text_offset": list(range(0, 4 * num_tokens, 4)),
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": [chooser.randrange(151936) for _ in range(num_prompt_tokens)],
        "routed_experts": None,
    }


def answer(num_tokens: int, num_prompt_tokens: int | None, n: int) -> bytes:
    """The complete HTTP response."""
    choices = [choice(num_tokens, num_prompt_tokens, random.Random(0)) | {"index": index} for index in range(n)]
    usage = {"prompt_tokens": num_prompt_tokens or 0, "completion_tokens": n * num_tokens, "total_tokens": 0}
    body = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "policy", "choices": choices}
    text = json.dumps(body | {"usage": usage}, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text


class Server:
    """Handles one request at a time per connection, like HTTP/1.1 clients send them."""

    def __init__(self, num_tokens: int, num_prompt_tokens: int | None, tokens_per_s: float) -> None:
        self._sizes, self._answers = (num_tokens, num_prompt_tokens), dict[int, bytes]()
        self._delay_s = num_tokens / tokens_per_s if tokens_per_s else 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                n = int(body.partition(b'"n":')[2].lstrip()[:4].partition(b",")[0] or 1)
                if n not in self._answers:
                    self._answers[n] = answer(*self._sizes, n)
                if self._delay_s and length:
                    await asyncio.sleep(self._delay_s)
                writer.write(self._answers[n])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="of each request; 0: respond immediately")
    parser.add_argument("--lists", action="store_true", help="a JSON number for each id and log-prob")
    args = parser.parse_args()
    responder = Server(args.tokens, args.prompt_tokens if args.lists else None, args.tokens_per_s)
    server = await asyncio.start_server(responder.serve, "127.0.0.1", 0, limit=1 << 24, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
