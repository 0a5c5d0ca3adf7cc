"""The study of ``mosaic.colocate`` on several ranks, against the fastest DistributedDataParallel."""
