"""CPU time per request of HTTP client libraries: `python -m benchmarks.rollout.http_libraries`.

Each sends the same requests (256 prompt ids in, 512 ids with log-probs out) to a server that responds immediately, with
`--concurrency` in flight, and reads the whole body. The JSON is not parsed, since that costs the same with all of them.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from benchmarks.rollout.dummy import dummy_server

Post = Callable[[bytes], Awaitable[bytes]]


async def with_aiohttp(url: str, stack: AsyncExitStack) -> Post:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def post(body: bytes) -> bytes:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            return await response.read()

    return post


async def with_httpx(url: str, stack: AsyncExitStack) -> Post:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = await stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=600))

    async def post(body: bytes) -> bytes:
        return (await client.post(url, content=body, headers={"Content-Type": "application/json"})).content

    return post


async def with_asyncio(url: str, stack: AsyncExitStack) -> Post:
    """A lower bound: no redirects, chunked bodies, time limits or TLS."""
    parts = urlsplit(url)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @stack.callback
    def close() -> None:
        for _, writer in idle:
            writer.close()

    async def post(body: bytes) -> bytes:
        reader, writer = (
            idle.pop() if idle else await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        )
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        content = await reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0]))
        idle.append((reader, writer))
        return content

    return post


LIBRARIES = {"aiohttp": with_aiohttp, "httpx": with_httpx, "asyncio streams": with_asyncio}


async def measure(name: str, url: str, *, num_requests: int, concurrency: int) -> tuple[float, float]:
    """Return (CPU milliseconds of this process per request, requests per second)."""
    body = json.dumps({"prompt": list(range(100000, 100256)), "n": 1, "max_tokens": 512}).encode()
    async with AsyncExitStack() as stack:
        post = await LIBRARIES[name](f"{url}/v1/completions", stack)
        left = iter(range(num_requests + concurrency))

        async def worker(marks: asyncio.Event) -> None:
            for number in left:
                if number == concurrency:
                    marks.set()  # all connections are open
                assert len(await post(body)) > 10_000

        opened = asyncio.Event()
        tasks = [asyncio.ensure_future(worker(opened)) for _ in range(concurrency)]
        await opened.wait()
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*tasks)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return 1e3 * cpu / num_requests, num_requests / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="the best round is reported")
    args = parser.parse_args()
    print(f"{args.requests} requests, {args.concurrency} in flight, best of {args.rounds}")
    print("| library | CPU ms per request | requests/s |\n| --- | --- | --- |")
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in LIBRARIES}
    with dummy_server(tokens=512, prompt_tokens=256, tokens_per_s=0, lists=True) as url:
        for _ in range(args.rounds):  # alternate, so that other load affects all libraries
            for name in LIBRARIES:
                one = measure(name, url, num_requests=args.requests, concurrency=args.concurrency)
                runs[name].append(asyncio.run(one))
    for name in LIBRARIES:
        cpu_ms, rate = min(runs[name])
        print(f"| {name} | {cpu_ms:.2f} | {rate:.0f} |")


if __name__ == "__main__":
    main()
