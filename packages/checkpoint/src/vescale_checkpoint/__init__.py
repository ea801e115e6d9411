"""vescale_checkpoint: checkpoints of sharded tensors that load under any other cluster size and plan."""

from vescale_trace.arguments import typed_facade as _typed_facade

from .plan._choice import Report as Report
from ._errors import CheckpointError as CheckpointError
from ._errors import ConflictError as ConflictError
from ._errors import CorruptError as CorruptError
from ._errors import FormatError as FormatError
from ._errors import MismatchError as MismatchError
from ._errors import PeerError as PeerError
from ._errors import StorageError as StorageError
from ._errors import UnsafeError as UnsafeError
from ._job import PendingSave as PendingSave
from ._job import close as close
from ._live_reshard import reshard as reshard
from ._protect import Protected as Protected
from ._protect import protect as protect
from .io._retention import Retention as Retention
from ._version import __version__ as __version__
from .api import latest as latest
from .api import load as load
from .api import save as save
from .huggingface import export_huggingface as export_huggingface
from .huggingface import whole_state_dict as whole_state_dict

_typed_facade(globals(), MismatchError, Retention)
