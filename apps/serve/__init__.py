"""The training API of the `tinker` SDK on DeepSpeed and vLLM."""
