"""Send requests to a server, and count the forwards of its target."""

import time

NUM_NEW = 24
PATH = "/v1/chat/completions"
WAIT_S = 30  # enough for short operations, even on a busy machine
NUM_ROWS = 4
SLOW_S = 0.02  # per forward, for answers that can be interrupted
MANY = 400  # tokens; at SLOW_S they take several seconds


def body(**options):
    messages = [{"role": "user", "content": "a word"}]
    return {"messages": messages, "max_tokens": NUM_NEW, "temperature": 0, **options}


class Forwards:
    """Hooks that count the target's forwards and slow them down."""

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
