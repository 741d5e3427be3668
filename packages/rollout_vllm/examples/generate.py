"""Generates from a running server: python generate.py http://127.0.0.1:8000 "The capital of France is"

Works with any vLLM server started with `--logprobs-mode processed_logprobs`. The API key is read from the environment
variable VLLM_API_KEY. The server tokenizes prompts and detokenizes responses.
"""

import argparse
import json
import os
import urllib.request
from typing import Any

from rollout_vllm import Endpoint, Group, Request, RolloutClient, SamplingConfig


def ask(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Any:
    """Call one of vLLM's helper routes."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--n", type=int, default=4, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()

    endpoint = Endpoint(args.url.rstrip("/"), os.environ.get("VLLM_API_KEY"))
    requests = [
        Request(prompt_id=text, prompt_ids=ask(endpoint, "/tokenize", {"prompt": text})["tokens"], seed=index)
        for index, text in enumerate(args.prompts)
    ]
    sampling = SamplingConfig(n=args.n, max_tokens=args.max_tokens, temperature=args.temperature)

    def show(group: Group) -> None:
        """Called as soon as a group ends, so scoring could start here."""
        for sample in group.samples:
            text = ask(endpoint, "/detokenize", {"tokens": sample.response_ids.tolist()})["prompt"]
            mean = 0.0 if sample.log_probs is None else float(sample.log_probs.mean())
            print(f"{group.prompt_id!r} #{sample.sample_index} ({sample.finish_reason}, {mean:.2f}): {text!r}")
        for failure in group.failures:
            print(f"{group.prompt_id!r} #{failure.sample_index} failed: {failure.kind}: {failure.message}")

    with RolloutClient([endpoint]) as client:
        client.generate_blocking(requests, sampling, on_group=show)
        print(f"{client.counters.response_tokens} tokens, {client.counters.num_retries} retries")


if __name__ == "__main__":
    main()
