"""What the facade builds on: the runtime and how a model is taken apart for it, not meant for users.

Nothing here is a promise to anybody else.
"""

from ._messages import Message as Message
from ._messages import Recorder as Recorder
from ._ownership import Ownership as Ownership
from ._ownership import let_go as let_go
from ._ownership import ownership as ownership
from ._runtime import Runtime as Runtime
from ._stage import Codec as Codec
