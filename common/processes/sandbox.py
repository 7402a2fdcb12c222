"""Programs that a policy has written run here: without a network, without the user's files, with limits on everything.

    worker (trusted)                    nursery                        keeper, and its program
    sandbox = Sandbox(["some.module"])
      starts the nursery     ---->      imports some.module, then
                                        leaves for namespaces of
                                        its own: see isolate()
    sandbox.start("some.module:role", [fd, ...], seconds=10)
      passes the fds         ---->      forks a keeper     ---->     new namespaces of processes and mounts,
                                                                     an empty folder /program; forks the program,
                                                                     which takes limits and runs role(fd, ...)
    running.wait()           <--------------------------------       "exit 0", "signal 9" or "timeout"

A role is a function of a trusted module. It runs in the program's process, and runs the program's text.

A fork of the nursery takes milliseconds, and a new Python would take fifty. The nursery passes file descriptors on and
never reads what is in them. So no program finds another one's text, or its tests, in its own memory.

The keeper ends the program after its time, or once the worker closes its end. The program is process 1 of its
namespace. When it ends, the kernel kills all that it started.

Where the kernel grants no namespaces (in most containers), bubblewrap is tried, and then the limits alone:
`Sandbox.missing` says what is not isolated. Such a program may end the nursery. The next start() makes a new one.

If the sandbox itself fails, SandboxFailed says so. Only what the program did is in the words of wait().
"""

import contextlib
import ctypes
import errno
import importlib
import json
import math
import os
import re
import resource
import select
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
START_SECONDS = 30.0
SAMPLE_SECONDS = 30.0
CLEAN_UP_SECONDS = 10.0
SAMPLE = "42"  # what the sample program answers
FAILED = "failed: "  # begins the words of a keeper that could not run its program
WORK = "/program"  # where a program runs, if there are namespaces

MEMORY_BYTES = 2 * 2**30  # addresses of each process
PROCESSES = 32  # of a program, its threads included
OPEN_FILES = 64
FILE_BYTES = 16 * 2**20  # one file
WORK_BYTES = 64 * 2**20  # all files of a program together
FIRST_UID = 60000  # root's programs run as a user without rights, each program as another one

# A program sees nothing of the trainer's environment. Threads of numpy's libraries would count as processes.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same verdict each time, also where the order of a set decides
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# Parts of the machine that programs see, read-only: Python, what it is linked with, and harmless devices.
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Numbers of the kernel's interface.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
# A second mount of the same files must keep these flags. statvfs() has other numbers for some of them than mount().
KEPT_FLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 36, 38
READS_ALL = 1 << 2  # the capability CAP_DAC_READ_SEARCH
CAPABILITY_VERSION = 0x20080522
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SECCOMP_ALLOW, SECCOMP_ERROR = 22, 2, 0x7FFF0000, 0x50000
# For each machine: its number, and add_key, request_key and keyctl, which follow each other.
KEYRING_CALLS = {"x86_64": (0xC000003E, 248, 250), "aarch64": (0xC00000B7, 217, 219)}


KINDS = ("namespaces", "bubblewrap", "limits")  # the strictest first


class SandboxFailed(RuntimeError):
    """The sandbox itself has failed. That says nothing about the program."""


class Running:
    """A program that has been started."""

    def __init__(self, status: socket.socket, keeper_in_reach: bool):
        """keeper_in_reach: whether the program may send signals to its keeper."""
        self.status = status
        self.keeper_in_reach = keeper_in_reach

    def wait(self) -> str:
        """Waits for the end: "exit N", "signal N" or "timeout". Raises SandboxFailed if nobody knows it."""
        with self.status:
            words = self.status.recv(1000).decode()
        if words.startswith(FAILED):
            raise SandboxFailed(words.removeprefix(FAILED))
        if words:
            return words
        # The keeper was killed. A program that can do that must not get away with it.
        if self.keeper_in_reach:
            return "signal 9"
        raise SandboxFailed("the keeper of the program was killed")

    def stop(self) -> None:
        """End the program now."""
        self.status.close()


class Sandbox:
    """One nursery. Only one thread may call start()."""

    def __init__(self, modules: list[str], kinds: tuple[str, ...] = KINDS):
        """modules: those with the roles, imported before the nursery is locked in. kinds: what is tried, in order.

        Raises SandboxFailed if none of them runs a sample program.
        """
        if sys.platform != "linux":
            raise SandboxFailed("the sandbox for programs needs Linux")
        self.modules = modules
        problems = []
        for self.kind in kinds:
            problem = self.open(self.kind)
            if not problem:
                break
            problems.append(f"{self.kind}: {problem}")
        else:
            raise SandboxFailed(f"the sandbox for programs does not start ({'; '.join(problems)})")
        self.missing = ", ".join(missing_in(self.kind, self.has_own_namespaces))
        if self.missing and problems:
            self.missing += f" ({'; '.join(problems)})"

    def open(self, kind: str) -> str:
        """Start the nursery, and run a sample program. Returns what went wrong, or nothing."""
        if kind == "bubblewrap" and shutil.which("bwrap") is None:
            return "not installed"
        problem = self.start_nursery(kind) or self.run_sample()
        if problem:
            self.close()
        return problem

    def start_nursery(self, kind: str) -> str:
        """Returns what went wrong, or nothing."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        modules = [*self.modules, __name__]  # this one has the role of the sample
        settings = json.dumps({"kind": kind, "modules": modules, "path": import_path()})
        command = [sys.executable, "-P", "-m", "common.processes.sandbox", str(theirs.fileno()), settings]
        if kind == "bubblewrap":
            command = [*bubblewrap(), *command]
        # Python itself may need it, as on clusters with modules.
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs, tempfile.TemporaryFile() as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={**ENVIRONMENT, **libraries, "PYTHONPATH": ROOT},
            )
            theirs.close()  # otherwise the end of the nursery would go unnoticed
            self.control.settimeout(START_SECONDS)
            try:
                answer = self.control.recv(10_000)
            except TimeoutError:
                return f"no answer within {START_SECONDS:g} s"
            self.control.settimeout(None)
            if not answer:
                self.process.wait()
                errors.seek(0)
                last_line = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                return f"it ended at once: {last_line[:300]}".removesuffix(": ")
        facts = json.loads(answer)
        self.has_own_namespaces = facts["has_own_namespaces"]
        return facts["problem"]

    def run_sample(self) -> str:
        """Why a program that is right would be called wrong, or nothing."""
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as answer:
            try:
                running = self.send(f"{__name__}:sample_program", [writer], SAMPLE_SECONDS)
            except OSError as error:
                return f"it ended before the first program: {error}"
            finally:
                os.close(writer)
            try:
                ended = running.wait()
            except SandboxFailed as failure:
                return str(failure)
            said = answer.read().decode()
        if (ended, said) == ("exit 0", SAMPLE):
            return ""
        return f"a sample program does not run: {said or ended}"

    def start(self, role: str, fds: list[int], seconds: float) -> Running:
        """Start role(*fds) in a process of its own. The caller may close its copies of the fds afterwards.

        Raises SandboxFailed if the nursery has ended, and no new one starts.
        """
        try:
            return self.send(role, fds, seconds)
        except OSError:  # the nursery is gone
            self.close()
            problem = self.open(self.kind)
            if problem:
                raise SandboxFailed(f"the sandbox for programs does not start again ({problem})") from None
            return self.send(role, fds, seconds)

    def send(self, role: str, fds: list[int], seconds: float) -> Running:
        """Ask the nursery for a program. Raises OSError if it is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps({"role": role, "seconds": seconds}).encode()
        with theirs:
            socket.send_fds(self.control, [message], [theirs.fileno(), *fds])
        is_another_user = self.kind != "bubblewrap" and os.geteuid() == 0
        return Running(ours, keeper_in_reach=not self.has_own_namespaces and not is_another_user)

    def close(self) -> None:
        """End the nursery."""
        self.control.close()
        self.process.kill()
        self.process.wait()


def missing_in(kind: str, has_own_namespaces: bool) -> list[str]:
    """What a sandbox of this kind does not isolate or limit."""
    is_root = os.geteuid() == 0
    found = []
    if kind == "limits":
        reads_all = is_root and permitted_capabilities() & READS_ALL
        files = "every file of this machine" if reads_all else "the files of this machine that their user may read"
        found.append(f"programs reach the network and {files}")
    if not has_own_namespaces and (kind == "bubblewrap" or not is_root):
        found.append("programs reach the other processes of their user")
    if not has_own_namespaces:
        found.append("all files of a program together have no limit and may outlive it")
    if kind == "bubblewrap" and is_root:
        found.append("the kernel does not count root's processes")
    return found


def import_path() -> list[str]:
    """Where programs find modules: the standard library, and what is installed beside it."""
    return [path for path in sys.path if path and path != ROOT and os.path.isdir(path) and is_installed(path)]


def is_installed(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in python_folders())


def python_folders() -> list[str]:
    """Folders with this Python and its packages."""
    folders = {sys.prefix, sys.base_prefix, *site.getsitepackages()}
    folders |= {os.path.realpath(folder) for folder in folders}  # .venv may be a link
    return sorted(folder for folder in folders if os.path.isdir(folder))


# Inside the nursery


def main(control_fd: int, settings: dict) -> None:
    control = socket.socket(fileno=control_fd)
    modules = {name: importlib.import_module(name) for name in settings["modules"]}
    set_death_signal(os.getppid())
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends programs first
        Path("/proc/self/oom_score_adj").write_text("1000")
    problem = ""
    has_own_namespaces = False
    try:
        if settings["kind"] == "namespaces":
            isolate()
        has_own_namespaces = settings["kind"] != "limits" and can_unshare()
        if settings["kind"] == "namespaces" and not has_own_namespaces:
            problem = "no namespace of processes"
    except OSError as error:
        problem = f"{error.strerror} ({error.filename})"
    control.send(json.dumps({"problem": problem, "has_own_namespaces": has_own_namespaces}).encode())
    if problem:
        return
    # Standard error has been for an error of the start. Programs get /dev/null, as their standard output.
    os.dup2(1, 2)
    sys.path[:] = settings["path"]
    os.environ.pop("PYTHONPATH", None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1000, 20)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            request = json.loads(message)
            module, _, function = request["role"].partition(":")
            role = getattr(modules[module], function)
            keeper_main(role, fds[0], fds[1:], request["seconds"], has_own_namespaces, settings["kind"] == "bubblewrap")
        for fd in fds:
            os.close(fd)


def isolate() -> None:
    """New namespaces for this process: no network, and a file system with Python and nothing of the user's.

    Raises OSError where the kernel refuses. Root needs no user namespace, and its programs become another user.
    """
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS | (CLONE_NEWUSER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    new = tempfile.mkdtemp(prefix="sandbox-")
    mount("tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    root = f"{new}/root"
    os.mkdir(root)
    for path in dict.fromkeys([*SYSTEM, *DEVICES, *python_folders()]):
        show(path, root)
    os.mkdir(root + WORK)
    os.mkdir(f"{new}/old")
    call("pivot_root", new.encode(), f"{new}/old".encode())
    os.chdir("/")
    os.rmdir(f"/old{new}")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    # Below a chroot the kernel grants no user namespace, in which a program could mount memory without a limit.
    os.chroot("/root")
    os.chdir("/")


def show(path: str, new: str) -> None:
    """Make a path of this machine visible under the new root, read-only."""
    target = new + path
    if not os.path.exists(path) or os.path.exists(target):  # absent, or inside a folder that is visible already
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):  # such as /bin, which is usr/bin
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        Path(target).touch()
    mount(path, target, "", MS_BIND | MS_REC)
    no_devices = 0 if path in DEVICES else MS_NODEV
    # A remount changes this mount alone, and not those below it.
    for mounted in mounts_in(target):
        flags = os.statvfs(mounted).f_flag
        kept = sum(of_mount for of_statvfs, of_mount in KEPT_FLAGS.items() if flags & of_statvfs)
        mount("none", mounted, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | no_devices | kept)


def mounts_in(path: str) -> list[str]:
    """Where something is mounted: the path itself, and below it."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # The kernel writes a space as \040.
    points = [re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines]
    return [point for point in points if point == path or point.startswith(f"{path}/")]


def bubblewrap() -> list[str]:
    """The command that starts the nursery where only bubblewrap may make namespaces."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-add", "CAP_SYS_ADMIN"]
    command += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", WORK]
    for path in dict.fromkeys([*SYSTEM, *python_folders(), f"{ROOT}/common"]):
        command += ["--ro-bind-try", path, path]
    # Both are memory without a limit, and what a program leaves there the next one would find.
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return command


def can_unshare() -> bool:
    """Whether a keeper may have namespaces of its own. bubblewrap's profile on Ubuntu forbids it."""
    child = os.fork()
    if child == 0:
        try:
            unshare_for_program()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


# Inside a keeper


def keeper_main(
    role: Callable, status_fd: int, fds: list[int], seconds: float, has_own_namespaces: bool, in_bubblewrap: bool
) -> None:
    """Fork the program, wait for its end, and say how it ended. Never returns."""
    code = 1
    try:
        # Whoever kills the worker's group does not kill this process: it has to end the program first.
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = socket.socket(fileno=status_fd)
        try:
            words = watch(role, status, fds, seconds, has_own_namespaces, in_bubblewrap)
        except Exception as error:
            status.send(f"{FAILED}{described(error)}".encode()[:1000])
            raise
        with contextlib.suppress(OSError):  # the worker may not care any more
            status.send(words.encode())
        code = 0
    finally:
        os._exit(code)


def watch(
    role: Callable,
    status: socket.socket,
    fds: list[int],
    seconds: float,
    has_own_namespaces: bool,
    in_bubblewrap: bool,
) -> str:
    """Run the program. Returns the words for Running.wait()."""
    folder = WORK
    if has_own_namespaces:
        unshare_for_program()
    else:
        # All else is read-only in bubblewrap.
        folder = tempfile.mkdtemp(prefix="program-", dir=WORK if in_bubblewrap else None)
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(folder)
    # bubblewrap's namespace has no other user, and no rights to give up.
    uid = FIRST_UID + os.getpid() % 5000 if os.geteuid() == 0 and not in_bubblewrap else None
    reader, report_fd = os.pipe()
    child = os.fork()
    if child == 0:
        run_role(role, fds, folder, seconds, uid, report_fd)
    os.close(report_fd)
    for fd in fds:  # a reader sees the end of the program only if nobody else holds its pipes
        os.close(fd)
    words = wait_for(child, status, seconds)
    if not has_own_namespaces:
        end_descendants()
        shutil.rmtree(folder, ignore_errors=True)
    # The program has closed its end before its role began, so this does not wait.
    report = os.read(reader, 500).decode(errors="replace")
    return f"{FAILED}{report}" if report else words


def unshare_for_program() -> None:
    """Namespaces of processes, mounts and shared memory, and an empty folder in memory. Raises OSError."""
    call("unshare", CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC)
    mount("tmpfs", WORK, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=777,size={WORK_BYTES},nr_inodes=1000")
    if os.path.isdir("/proc"):  # in bubblewrap. It shows the processes of the nursery, and other programs.
        mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "mode=555")


def wait_for(child: int, status: socket.socket, seconds: float) -> str:
    """How the program has ended. It is killed when its time is up, or when the worker hangs up."""
    # A signal of a child writes to this pipe. Old kernels have no pidfd, nor do Pythons that were built for them.
    ends, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = select.poll()
    waiting.register(ends, select.POLLIN)
    waiting.register(status, 0)  # hanging up is always reported
    until = time.monotonic() + seconds
    while True:
        # WNOWAIT: the waitpid() below still finds it. Without namespaces, other children end here, too.
        in_time = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        left = until - time.monotonic()
        if in_time or left <= 0:
            break
        ready = [fd for fd, _ in waiting.poll(left * 1000)]
        if status.fileno() in ready:
            break
        if ready:
            os.read(ends, 1000)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time:
        return "timeout"
    return f"exit {code}" if code >= 0 else f"signal {-code}"


def end_descendants() -> None:
    """Kill what a program has left behind. Without a process namespace its orphans become this process's children.

    Processes that fork as fast as they are killed are stopped first, until there are no more to stop.
    """
    stopped: set[int] = set()
    until = time.monotonic() + CLEAN_UP_SECONDS
    while time.monotonic() < until:
        found = descendants(os.getpid())
        for process in found - stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
        if found <= stopped:
            break
        stopped |= found
    for process in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < until:
            # One that was not found may sleep for ever, so this must not wait for it.
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)


def descendants(process: int) -> set[int]:
    found: set[int] = set()
    for child in children_of(process):
        found |= {child, *descendants(child)}
    return found


def children_of(process: int) -> set[int]:
    found: set[int] = set()
    lists: list[Path] = []
    with contextlib.suppress(OSError):  # it has ended, perhaps while it is looked at
        lists = list(Path(f"/proc/{process}/task").glob("*/children"))
    for path in lists:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= set(map(int, path.read_text().split()))
    has_ended = not os.path.exists(f"/proc/{process}")
    return found if lists or has_ended else children_by_parent(process)


def children_by_parent(process: int) -> set[int]:
    """The same, for kernels that keep no lists of children."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may have spaces and brackets in it: state and parent.
            _, parent = path.read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if int(parent) == process:
                found.add(int(path.parent.name))
    return found


# Inside the program's process


def run_role(role: Callable, fds: list[int], folder: str, seconds: float, uid: int | None, report_fd: int) -> None:
    """Take the limits, give up all rights, and run the role. Never returns.

    uid: the user in root's place. report_fd: where the keeper reads why the role could not begin.
    """
    code = 1
    try:
        try:
            os.setsid()
            keep_only([*fds, report_fd])
            take_limits(folder, seconds, uid)
        except Exception as error:
            os.write(report_fd, described(error).encode()[:500])
            raise
        os.close(report_fd)
        code = role(*fds) or 0
    finally:
        os._exit(code)


def take_limits(folder: str, seconds: float, uid: int | None) -> None:
    """Nothing of this can be taken back. Raises OSError."""
    give_up_rights(folder, uid)
    set_death_signal(None)
    limit = lambda what, value: resource.setrlimit(what, (value, value))
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_CPU, math.ceil(seconds) + 1)
    limit(resource.RLIMIT_NPROC, PROCESSES)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    os.environ.update(HOME=folder, TMPDIR=folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]


def sample_program(fd: int) -> int:
    """The role that a new nursery runs first. Like any program it imports a module, and has a folder for its files."""
    try:
        colorsys = importlib.import_module("colorsys")  # of the standard library, and nobody has imported it yet
        _, _, value = colorsys.rgb_to_hsv(0, 0, 42)
        file = Path("sample")
        file.write_text(f"{value}")
        said = file.read_text()
        file.unlink()
    except (ImportError, OSError) as error:
        said = f"{described(error)} (may every user read {sys.prefix}?)"
    os.write(fd, said.encode())
    return 0


def keep_only(fds: list[int]) -> None:
    """Close all files but the standard ones and those of the role."""
    start = 3
    for fd in [*sorted(fds), 4096]:
        os.closerange(start, fd)
        start = fd + 1


def give_up_rights(folder: str, uid: int | None) -> None:
    """Become this user, if there is one, and drop every capability for good."""
    kept = 0
    if uid is not None:
        if folder != WORK:
            os.chown(folder, uid, uid)
            # Root's Python may be where only root reads. In many containers root itself lacks this right.
            kept = permitted_capabilities() & READS_ALL
            call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    forbid_keyrings()
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    call("capset", header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0))  # effective, permitted, inheritable; twice 32
    # A process of the same user could read this one's memory otherwise.
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def permitted_capabilities() -> int:
    """The first 32 that this process may use, as bits."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    found = (ctypes.c_uint32 * 6)()
    call("capget", header, found)
    return found[1]


def forbid_keyrings() -> None:
    """Forbid the kernel's keyrings. They hold secrets of the user, and they outlive a program.

    Where the kernel has no filters, or the processor is another one, they stay.
    """
    if os.uname().machine not in KEYRING_CALLS:
        return
    machine, first, last = KEYRING_CALLS[os.uname().machine]
    load, is_equal, is_above, end = 0x20, 0x15, 0x35, 0x06
    # Each line: instruction, lines to skip if it is true, and if it is not, value.
    lines = [
        (load, 0, 0, 4),  # the machine
        (is_equal, 0, 4, machine),  # a program may also call as a 32-bit one, with other numbers
        (load, 0, 0, 0),  # the number of the call
        (is_above, 2, 0, 0x40000000),  # or as x32
        (is_above, 0, 2, first),
        (is_above, 1, 0, last + 1),
        (end, 0, 0, SECCOMP_ERROR | errno.ENOSYS),
        (end, 0, 0, SECCOMP_ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(lines), ctypes.addressof(buffer))
    with contextlib.suppress(OSError):
        call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0)


def set_death_signal(parent: int | None) -> None:
    """End with the parent. parent: its process id, to see whether it is gone already."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


# The kernel's interface


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def call(name: str, *arguments) -> None:
    """A function of the C library that returns 0. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    data = options.encode() if options else None
    if library.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
