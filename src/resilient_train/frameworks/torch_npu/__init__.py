"""What a recovery must tell an Ascend NPU through torch_npu, which is looked up, never imported."""
