"""A snapshot that is under way: its copy, and then the record that makes it the newest."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resilient_train.frameworks.roles import Image
from resilient_train.protocol.messages import Captured
from resilient_train.state.capture import Capture
from resilient_train.state.vault import trailer
from resilient_train.state.vault.slots import SnapshotDraft, image_digest


class SnapshotInFlight(msgspec.Struct, frozen=True):
    """The state from before update ``commits``, on its way into the slot of ``draft``. Made by ``begin``."""

    draft: SnapshotDraft
    image: Image
    capture: Capture
    commits: int
    step: int
    own: dict[int, bytes]
    store: bool
    last: int
    """The generation in which the job ends; -1: it goes on."""
    fingerprint: Callable[[], int]
    """Of what the rank has in common with its replicas; waits until it is known. 0: it will not be."""

    def complete(self, generation: int, world_size: int) -> Captured:
        """Waits for the copy, then commits: from there on this is the newest. Raises TransferError: it can't be."""
        draft, image = self.draft, self.image
        chunks = self.capture.finish()
        fingerprint = self.fingerprint()
        held = trailer.Trailer(
            draft.sequence, self.commits, self.step, image.tree, image.names, self.own, chunks, fingerprint
        )
        trailer.write(draft.image, image.total_bytes, msgspec.msgpack.encode(held))
        draft.commit(
            commits=self.commits,
            step=self.step,
            image_bytes=image.total_bytes,
            generation=generation,
            world=world_size,
            digest=image_digest(chunks),
        )
        return Captured(self.commits, self.step, draft.sequence, self.store, self.last, fingerprint)

    def abandon(self) -> None:
        """Gives it up. The slot stays incomplete until the next one."""
        self.fingerprint()
        self.capture.abort()
        self.draft.abandon()
