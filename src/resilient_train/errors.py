"""Every exception this library raises, by whose fault it is.

::

    BaseException
     +-- TrainingInterrupted        nobody's: a recovery is under way; caught by `with step:`, never by you
    Exception
     +-- ResilientError
          +-- ConfigError           yours, before training: a switch, flag, plan or argument is wrong
          +-- UsageError            yours, while training: the loop broke a rule of the Session
          +-- StateError            yours: a registered object's state can't be carried to another process
          +-- ProtocolError         ours, or a foreign process: a frame or shared page isn't what it must be
          +-- TransferError         the machine's: state did not arrive, or arrived with another digest
          |    +-- LayoutError      ... yours: it is that of another model than this process has built
          +-- StorageError          the machine's: a checkpoint could not be written; older ones are untouched
          +-- CheckpointError       a file's: a checkpoint isn't whole, or not what its manifest says
          +-- VaultError            the machine's: memory snapshots can't be kept, or are gone
          |    +-- MemoryLimitError ... there is too little memory for them; nothing was allocated
          |    +-- HolderLostError  ... the process that holds them is gone
          |         +-- HolderSilentError  ... it is there, and does not answer in time
          +-- DeviceError           the accelerator's: it does not do what a recovery tells it; the process ends
          +-- JobEnded              the job's: the agent ended the run; the text says why
"""

from __future__ import annotations

from typing import final


class ResilientError(Exception):
    """Base of the errors below."""


class ConfigError(ResilientError):
    """A switch, flag, fault plan or argument is wrong. The commands exit with code 2."""


class UsageError(ResilientError):
    """The training loop did something a Session cannot make safe."""


class StateError(ResilientError):
    """The state of a registered object holds a value that cannot be carried to another process."""


class ProtocolError(ResilientError):
    """A frame on the wire, or a page of shared memory, is not what the protocol says."""


class TransferError(ResilientError):
    """State of a replica did not arrive, or arrived with another digest."""


class LayoutError(TransferError):
    """State that is meant for this process is that of another model: no second try can make it fit."""


class StorageError(ResilientError):
    """A checkpoint could not be written: full, failing or read-only storage. The ``OSError`` is its cause.

    What had been written of it is removed, and no older checkpoint was touched, unless the text says otherwise.
    """


class CheckpointError(ResilientError):
    """A checkpoint is not whole, or is not what its manifest says: it is refused as a whole."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file = file
        """The file at fault, by its name in the checkpoint; "." for the directory itself."""
        self.reason = reason


class VaultError(ResilientError):
    """Snapshots in memory can't be kept, found or handed out. Training can go on without them."""


class MemoryLimitError(VaultError):
    """There is too little memory for a rank's snapshots; the text says how much is needed. Nothing was allocated."""


class HolderLostError(VaultError):
    """The process that holds this node's snapshots is gone. They live on in the processes that have mapped them: a new
    holder can adopt them from there.
    """


class HolderSilentError(HolderLostError):
    """That process did not answer in time: it is stopped, or the machine is at its end. It may hold all there is."""


class DeviceError(ResilientError):
    """The accelerator, or its runtime, did not do what a recovery told it. The process ends and is replaced."""


class JobEnded(ResilientError):  # noqa: N818 - nobody's error: it says what the agent decided
    """The agent ended the job while this rank was waiting for it."""


@final
class TrainingInterrupted(BaseException):
    """Unwinds the body of a step, so that the step can run again after a recovery.

    A ``BaseException``, like ``KeyboardInterrupt``: ``except Exception`` in user code must not keep a rank in a step
    that the rest of the job has given up. Let it pass; ``with step:`` catches it.
    """
