"""What torch divides a model by: FSDP2 and TP, ZeRO-1, pipelines."""
