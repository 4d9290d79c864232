"""An HTTP(S) receiver of the tests' own: records requests as they came, verifies signatures, answers as told."""

from tests.support.receiver.answers import Behaviour
from tests.support.receiver.request import Request
from tests.support.receiver.server import Receiver

__all__ = ["Behaviour", "Receiver", "Request"]
