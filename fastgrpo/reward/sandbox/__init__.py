"""Runs programs that a model wrote, where they can do no harm, and decides outside whether they are right.

    worker ──config──► inside.py (own namespaces, limits) ──► the program             knows: inputs
       │                                                         │ ▲ calls and values, as data (wire.py)
       └────config──► inside.py (a sandbox of its own) ──► tester.py                  knows: tests, expected values
       ◄──verdicts──────────────────────────────────────────────┘

    box.py        start one sandbox, read what it says, end it     inside.py   what is isolated and limited
    verdicts.py   program and tests -> verdicts                    harness.py  calls the program's functions
    isolation.py  which isolation this machine allows, tried out   tester.py   runs the tests
    walls.py      namespaces and files                             filter.py   system calls

The program never sees a test or an expected value: not in its process, its files, its arguments or its parent's
memory. Of a standard-input case it is given the input, and its output is compared by the worker; of a test the
arguments, and what it returns is compared by the tester as plain data. So nothing that a program does to itself (its
exit code, its output, what `==` means on its objects) can make a test pass. inside.py, walls.py, filter.py, harness.py,
tester.py and wire.py run in a bare interpreter and import only the standard library.
"""
