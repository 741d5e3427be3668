"""DPO, IPO and KTO on DeepSpeed and Ray."""
