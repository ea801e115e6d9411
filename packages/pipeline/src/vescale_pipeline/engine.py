"""Engine for the facade: the runtime and how a model is taken apart for it, not meant for users.

What the facade imports is kept for the next minor version (`tools/checks/sibling_names.py`); to anybody else nothing
here is a promise.
"""

from ._runtime.batch.microbatches import split as split
from ._runtime.ownership import Ownership as Ownership
from ._runtime.ownership import ownership as ownership
from ._runtime.ownership import release as release
from ._runtime.runtime import READING as READING
from ._runtime.runtime import Runtime as Runtime
from ._runtime.stage import Codec as Codec
from ._trace.record import seen as seen
from ._transport.alone import Alone as Alone
from ._transport.alone import Crossing as Crossing
from ._transport.alone import Learning as Learning
from ._transport.messages import Message as Message
from ._transport.messages import Recorder as Recorder
from ._transport.p2p import Link as Link
