"""Code that tests import, as an agent leaves it, which would rather have no verdict than a bad one."""

from __future__ import annotations

EVERY_PROCESS = """\
import os, signal, time
def each(number):
    for pid in sorted(map(int, filter(str.isdigit, os.listdir('/proc')))):
        if pid != os.getpid():
            try: os.kill(pid, number)
            except OSError: pass
"""
AWAY = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
"""What follows, with four blanks before it, is done by a process that has left its parent."""
CODE = {
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "kills all that it may": "import os\nos.kill(-1, 9)",
    "stops all that it may": "import os\nos.kill(-1, 19)",
    "kills each process by its number": EVERY_PROCESS + "each(signal.SIGKILL)\ntime.sleep(99)",
    "stops each process by its number": EVERY_PROCESS + "each(signal.SIGSTOP)\ntime.sleep(99)",
    "sends each process every signal": EVERY_PROCESS + "for number in range(1, 65): each(number)\ntime.sleep(99)",
    "hangs": "import time\ntime.sleep(999)",
    "ignores what would end it": "import signal, time\n"
    "for number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "time.sleep(999)",
    "takes all memory": "b = bytearray(900 << 20)\n"
    "for i in range(0, len(b), 4096): b[i] = 1\nimport time; time.sleep(5)",
    "takes all CPU time": "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
    "is a flood of processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "is a flood of threads": "import threading, time\n"
    "while True:\n"
    "    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
    "    except RuntimeError: pass",
    "fills the disk": "import os\n"
    "for place in ('/logs/verifier', '/tmp', '/app', '/testbed', '/'):\n"
    "    for number in range(9):\n"
    "        try:\n"
    "            with open(f'{place}/full{number}', 'wb') as file:\n"
    "                for _ in range(90): file.write(os.urandom(1 << 20))\n"
    "        except OSError: pass",
    "opens all files": "held = []\nwhile True:\n    try: held.append(open('/dev/null'))\n    except OSError: pass",
    "prints for ever": "while True: print('x' * 65536)",
    "writes half a reward for ever": AWAY + "    for _ in range(300):\n"
    "        with open('/logs/verifier/reward.json', 'w') as file: file.write('{')\n"
    "        time.sleep(0.01)\n    os._exit(0)",
    "writes another reward": "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')",
    "names a reward twice": "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1, \"reward\": 0}')",
    "writes an infinite reward": "open('/logs/verifier/reward.json', 'w').write('{\"reward\": Infinity}')",
    "writes a large sparse reward": "import os\n"
    "open('/logs/verifier/reward.json', 'w').close()\nos.truncate('/logs/verifier/reward.json', 80 << 20)",
    "makes the reward a directory": "import os\nos.makedirs('/logs/verifier/reward.txt/reward.txt')",
    "makes the reward a pipe": "import os\nos.mkfifo('/logs/verifier/reward.json')",
    "makes the reward a link": "import os\nos.symlink('/dev/zero', '/logs/verifier/reward.json')",
    "removes the reward directory": "import os, shutil\n"
    "shutil.rmtree('/logs', ignore_errors=True)\nos.chmod('/logs/verifier', 0)\nos.kill(os.getppid(), 9)",
    "removes the tests": "import os, shutil\n"
    "for place in ('/tests', '/.megaflow-swebench'): shutil.rmtree(place, ignore_errors=True)\n"
    "os.kill(os.getppid(), 9)",
    "renames the tests": "import os\nos.rename('/tests/test.sh', '/tests/test.old')\nos.kill(os.getppid(), 9)",
    "removes all programs": "import shutil\n"
    "for place in ('/usr', '/bin', '/etc', '/lib', '/lib64'): shutil.rmtree(place, ignore_errors=True)",
    "closes the root directory": "import os\nos.chmod('/', 0)\nos.kill(os.getppid(), 9)",
    "closes its output": "import os, time\nos.closerange(0, 64)\ntime.sleep(99)",
    "leaves a process that holds its output": AWAY + "    time.sleep(99)",
    "leaves a process that stops all others": AWAY + "    while True:\n"
    "        os.kill(-1, 19)\n        time.sleep(0.01)",
    "writes into the runner's pipes": "import os\n"
    "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "    for fd in range(9):\n"
    "        try: os.write(os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK), b'0 0\\ngone\\n1 0\\n' * 99)\n"
    "        except OSError: pass",
    "reads the runner's pipes empty": "import os, time\n"
    "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "    try: os.read(os.open(f'/proc/{pid}/fd/0', os.O_RDONLY | os.O_NONBLOCK), 65536)\n"
    "    except OSError: pass\n"
    "time.sleep(99)",
    "breaks the memory of PID 1": "import re\n"
    "with open('/proc/1/maps') as maps, open('/proc/1/mem', 'wb', 0) as memory:\n"
    "    for line in maps:\n"
    "        start, end = (int(x, 16) for x in re.match('(\\\\w+)-(\\\\w+)', line).groups())\n"
    "        if ' r-xp ' in line and '[' not in line:\n"
    "            memory.seek(start); memory.write(bytes(end - start))\n"
    "import os, time\nos.kill(-1, 9)",
    "exits as if nothing could be tested": "import os\nos._exit(75)",
}  # fmt: skip
