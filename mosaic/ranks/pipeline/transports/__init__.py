"""How ranks of a pipeline reach each other: processes over torch.distributed, or threads of one."""
