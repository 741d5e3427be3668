# Source with WORK_DIR and MODEL: writes a random model and a table of prompts to WORK_DIR unless they exist.
mkdir -p "$1"
[ -f "$1/model/config.json" ] || python3 -m benchmarks.random_model "$2" "$1/model"
[ -f "$1/train.parquet" ] || python3 - "$1" <<'PY'
import sys
from pathlib import Path
from rl_data import write_task

task = write_task(Path(sys.argv[1]) / "task", num_train=1024, num_val=64, num_demonstrations=8, seed=0)
task.train.rename(Path(sys.argv[1]) / "train.parquet")
PY
