"""Send requests to a server, and count its forwards."""

import time

NUM_NEW = 24
PATH = "/v1/chat/completions"
WAIT_S = 30  # for short operations, on a busy machine too
NUM_ROWS = 4
SLOW_S = 0.02  # of a forward, for answers that can be interrupted
MANY = 400  # tokens; at this speed they take several seconds


def body(**options):
    messages = [{"role": "user", "content": "a word"}]
    return {"messages": messages, "max_tokens": NUM_NEW, "temperature": 0, **options}


class Forwards:
    """Context that counts the target's forwards and slows them down."""

    def __init__(self):
        self.num, self.num_at_once, self.most_at_once, self.seconds = 0, 0, 0, 0.0

    def begin(self, module, args):
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        time.sleep(self.seconds)

    def end(self, module, args, output):
        self.num += 1
        self.num_at_once -= 1


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()
