"""How the engine sees what a program does: functions of torch that it stands in for, operations as they are dispatched,
who has called, which objects there are. This room knows no other.
"""
