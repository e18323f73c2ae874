"""Message types of MIRO/1, and the limits both ends know."""

from __future__ import annotations

from enum import IntEnum

PROTOCOL = b"MIRO1"
MAJOR = 1
MINOR = 0
MIN_ID_BYTES = 8
MAX_ID_BYTES = 16
#: Largest frame a worker takes unless configured otherwise; ZeroMQ drops the connection of one that sends more.
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_MESSAGES = 10_000
MAX_SAMPLING_KEYS = 64
MAX_SAMPLING_ITEMS = 1024
MAX_CREDIT = 1_000_000
#: Largest body of any request but GENERATE.
MAX_SMALL_BODY_BYTES = 4096
#: How deep lists and maps nest in the `echo` of a PING: an end to what a worker takes apart and puts together again.
MAX_ECHO_DEPTH = 32
#: Extension keys begin with this and are ignored.
EXTENSION = "x_"


class Kind(IntEnum):
    """Message types: below 0x80 from client to worker, from 0x80 from worker to client."""

    HELLO = 0x01
    GENERATE = 0x02
    CREDIT = 0x03
    CANCEL = 0x04
    TOKENIZE = 0x05
    DETOKENIZE = 0x06
    TEMPLATE = 0x07
    EMBED = 0x08
    PING = 0x0A
    STATS = 0x0B
    HEALTH = 0x0C
    MODELS = 0x0D
    DRAIN = 0x0E
    WELCOME = 0x81
    ACCEPTED = 0x82
    CHUNK = 0x83
    PROGRESS = 0x84
    END = 0x85
    RESULT = 0x86
    PONG = 0x8A
    ERROR = 0x8F
