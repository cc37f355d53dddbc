"""An independent provider of ``mindio_ttp``: what MindSpore's ``TrainFaultTolerance`` and its like call, on any
device.
"""
