"""Programs that attack the code reward, for test_reward_code.py: what they try is their name."""

from __future__ import annotations

from textwrap import dedent

# Each tries to pass `assert add(...) == ...` without computing it.
CHEATS = {
    "exit code": "import sys\nsys.exit(0)",
    "exit code, at once": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "an int equal to everything": """
        class E(int):
            __eq__ = lambda s, o: True
            __ne__ = lambda s, o: False
            __hash__ = int.__hash__
        def add(a, b): return E(7)
        """,
    "an object equal to everything": """
        class E:
            def __eq__(s, o): return True
            def __bool__(s): return True
        def add(a, b): return E()
        """,
    "a patched assertion": """
        import builtins
        builtins.AssertionError = type('A', (BaseException,), {})
        def add(a, b): return None
        """,
    "verdicts of its own": """
        import os
        for fd in range(256):
            try: os.write(fd, b'{"passed": true, "error": null}\\n' * 3)
            except OSError: pass
        def add(a, b): return None
        """,
    "a message of its own": """
        import os, time
        os.write(3, (9).to_bytes(4, 'big') + b'{"value":')
        time.sleep(60)
        """,
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return None",
    "writes tests of its own": "open('tests.json', 'w').write('{}')\ndef add(a, b): return None",
    "searches memory and files": """
        import gc, os
        found = [o for o in gc.get_objects() if isinstance(o, str) and 'assert add' in o]
        for folder in ('/', '/box', '/tmp', '/root', '/home', '/proc/1', '/proc/self'):
            try: found += [name for name in os.listdir(folder) if name == 'tests.json']
            except OSError: pass
        for path in ('/proc/self/environ', '/proc/1/environ', '/proc/1/cmdline', '/proc/1/mem'):
            try: found += [open(path).read(100)]
            except OSError: pass
        def add(a, b): return a + b if found else None
        """,
}
CHEATS = {name: dedent(program) for name, program in CHEATS.items()}

SEARCH_FOR_OUTPUT = dedent(
    """
    import os
    for folder in ('/', '/box', '/tmp', '/root', '/home', '/etc', '/proc', '/proc/1', '/dev'):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if os.path.isfile(path) and '86753' + '09' in open(path, errors='replace').read(1000000):
                print('86753' + '09')
    """
)


def attacks(port: int, secret: str, written: str) -> dict[str, str]:
    """Against limits and walls; those that define a right `add` would pass if they got through."""
    programs = {
        "endless loop": "while True: pass",
        "endless call": "def add(a, b):\n    while True: pass",
        "fork bomb": """
            import os
            while True:
                try: os.fork()
                except OSError: pass
            """,
        "fork bomb in the call": """
            import os
            def add(a, b):
                while True:
                    try: os.fork()
                    except OSError: pass
            """,
        "10 GiB": "def add(a, b):\n    x = bytearray(10 << 30)\n    return a + b",
        "10 GiB in pieces": "def add(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 24))",
        "network": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\ndef add(a, b): return a + b",
        "reads outside": f"text = open({secret!r}).read()\ndef add(a, b): return a + b",
        "writes outside": f"open({written!r}, 'w').write('x')\ndef add(a, b): return a + b",
        "fills the disk": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()",
        "a daemon": """
            import os, time
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: time.sleep(1000)
                os._exit(0)
            def add(a, b): return None
            """,
        "prints without end": "while True: print('x' * 1000)",
        "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
        "a huge answer": "def add(a, b): return 'x' * (100 << 20)",
        "a nested answer": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
        "honest": "def add(a, b): return a + b",
        "honest, with a file": "open('notes.txt', 'w').write('x')\ndef add(a, b): return a + b",
    }
    return {name: dedent(program) for name, program in programs.items()}
