"""A seccomp filter: which system calls the kernel refuses a program, and all that it starts, from now on.

    EPERM    socket of any family but UNIX, io_uring (which makes sockets by itself), ptrace, other processes' memory
             signals to and limits of any process but itself (where it shares its user with others, it could end them)
    killed   a call of another architecture than this one

It needs no privilege, so it holds where namespaces are forbidden. Standard library only (see inside.py).
"""

from __future__ import annotations

import ctypes
import os
import struct

# processor -> audit architecture, socket, prlimit64,
#   kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo,
#   io_uring_setup, ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, pidfd_send_signal
_CALLS = {
    "x86_64": (0xC000003E, 41, 302, (62, 200, 234, 129, 297), (425, 101, 310, 311, 438, 424)),
    "aarch64": (0xC00000B7, 198, 261, (129, 130, 131, 138, 240), (425, 117, 270, 271, 438, 424)),
}
_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001
_AF_UNIX, _X32 = 1, 0x40000000


def refuse_calls(libc: ctypes.CDLL) -> bool:
    """For this process, whose id stays the program's; needs PR_SET_NO_NEW_PRIVS. False where there is no such filter,
    or none for this processor."""
    known = _CALLS.get(os.uname().machine)
    if known is None:
        return False
    architecture, socket_number, prlimit, signals, refused = known
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_ABOVE, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for number, only in [*((number, os.getpid()) for number in signals), (prlimit, 0), (socket_number, _AF_UNIX)]:
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 0, 1, only),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
