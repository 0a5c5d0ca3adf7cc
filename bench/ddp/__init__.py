"""Several ranks by the default line, against DistributedDataParallel at its best."""
