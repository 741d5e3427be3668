"""Time and memory of `python -m rl_data prepare`: `python -m benchmarks.prepare.run FOLDER [--gib 4] [--limit-gib 1]`.

Writes a JSON-lines file in GSM8K's layout, with rows of 2 KB of which one in twenty repeats a question, and prepares it
in a process whose data is limited (RLIMIT_DATA), which does not count the files that it maps.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

_GIB = 1 << 30


def write_rows(path: Path, num_bytes: int) -> int:
    """Write rows until the file has `num_bytes`; return their number."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(5000)]
    questions: list[str] = []
    written = num_rows = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < num_bytes:
            first, last = (" ".join(rng.choices(words, k=count)) for count in (25, 15))
            question = f"{first} {rng.randint(1, 999)} {last}?"
            if questions and rng.random() < 0.05:
                question = rng.choice(questions)
            elif len(questions) < 10_000:
                questions.append(question)
            answer = f"{' '.join(rng.choices(words, k=250))}\n#### {rng.randint(1, 9999)}"
            row = {"question": question, "answer": answer, "level": rng.randint(1, 5)}
            written += stream.write(json.dumps(row) + "\n")
            num_rows += 1
    return num_rows


def main() -> None:
    """Write the file, prepare it under the limit, and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="has room for twice the file")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the file")
    parser.add_argument("--limit-gib", type=float, default=1.0, help="data of the process")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file, limit = options.folder / "rows.jsonl", int(options.limit_gib * _GIB)
    num_rows = write_rows(file, int(options.gib * _GIB))
    print(f"{file}: {file.stat().st_size:,} bytes, {num_rows:,} rows", flush=True)
    command = [sys.executable, "-m", "rl_data", "prepare", str(file), "--out", str(options.folder / "out")]
    started = time.perf_counter()
    code = subprocess.run(
        [*command, "--overwrite"],
        check=False,
        # Each thread of Arrow reserves address space of its own.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    ).returncode
    wall_s, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, mib = used.ru_utime + used.ru_stime, file.stat().st_size / (1 << 20)
    print(f"exit code {code}; peak RSS {used.ru_maxrss / 1024:.0f} MiB, data at most {limit / (1 << 20):.0f} MiB")
    print(f"{wall_s:.0f} s with a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{cpu_s:.0f} s of CPU time, {mib / cpu_s:.1f} MiB per second of it")
    sys.exit(code)


if __name__ == "__main__":
    main()
