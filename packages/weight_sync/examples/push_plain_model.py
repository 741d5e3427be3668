"""Train a plain torch model for two steps and push it into a running vLLM server after each.

    python push_plain_model.py MODEL_FOLDER http://127.0.0.1:8000

The server serves MODEL_FOLDER (see the README for its flags). The model needs no engine and no framework.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from weight_sync import Endpoint, ModuleSource, WeightPusher


def main() -> None:
    """Train two steps and push after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("url")
    parser.add_argument("--api-key")
    parser.add_argument("--save", help="write the trained model into this folder")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(2, 34)[None]
    with WeightPusher(ModuleSource(model), [Endpoint(args.url, args.api_key)]) as pusher:
        for step in (1, 2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = pusher.push(version=step)
            print(f"version {report.version}: {report.num_bytes} bytes in {1000 * report.total_s:.0f} ms")
    if args.save:
        model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
