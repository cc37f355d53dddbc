"""Commands that can't be carried out. Each is answered in one line and with exit code 2."""

from __future__ import annotations

from typing import NamedTuple


class Bad(NamedTuple):
    """``words`` begin with the command. SCRIPT is a script that exists, FILE a file that is none, EMPTY a directory."""

    words: tuple[str, ...]
    says: str
    environ: dict[str, str]

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.environ.items()), *self.words])


def run(*words: str, says: str, **environ: str) -> Bad:
    return Bad(("resilient-run", *words), says, environ)


def train(*words: str, says: str) -> Bad:
    return Bad(("resilient-train", *words), says, {})


BAD = [
    run("SCRIPT", says="RESILIENT_NORM_THRESHOLD must be above 0", RESILIENT_NORM_THRESHOLD="0"),
    run("--faults", "norm rank=0 step=2 value=45", "SCRIPT", says="MS_ENABLE_TFT has no TRE:1"),
    run(says="training_script"),
    run("nowhere.py", says="there is no script 'nowhere.py'"),
    run("EMPTY", says="there is no script"),
    run("-m", "no_such_module_anywhere", says="there is no module 'no_such_module_anywhere'"),
    run("--nproc-per-node", "0", "SCRIPT", says="0 ranks"),
    run("--nproc-per-node", "-1", "SCRIPT", says="-1"),
    run("--nproc-per-node", "many", "SCRIPT", says="many"),
    run("--nproc-per-node", "gpu", "SCRIPT", says="not available"),
    run("--nproc-per-node", says="expected one argument"),
    run("--no-such-flag", "SCRIPT", says="--no-such-flag"),
    run("--max-restarts", "-1", "SCRIPT", says="max_restarts"),
    run("--max-restarts", "often", "SCRIPT", says="often"),
    run("--standby", "-1", "SCRIPT", says="--standby -1: it is 0 (no process stands by) or more"),
    run("--nnodes", "two", "SCRIPT", says="--nnodes two: it is a number of nodes, or the smallest and the largest"),
    run("--standby", "two", "SCRIPT", says="two"),
    run("--standby-depth", "idle", "SCRIPT", says="--standby-depth/--standby_depth: invalid choice: 'idle'"),
    run("--run-dir", "/proc/rt", "SCRIPT", says="the run directory can't be written"),
    run("--run-dir", "FILE", "SCRIPT", says="the run directory can't be written"),
    run("--run-dir", "caf\udce9", "SCRIPT", says=r"caf\udce9' is not UTF-8, and what is saved could not name it"),
    run("--log-dir", "FILE", "SCRIPT", says="--log-dir: "),
    run("--signals-to-handle", "SIGFOO", "SCRIPT", says="SIGFOO"),
    run("--faults", "kil rank=0 step=1", "SCRIPT", says="did you mean 'kill'"),
    run("--faults", "kill rank=7 step=1", "SCRIPT", says="ranks 0 to 0"),
    run("--faults", "kill rank=0", "SCRIPT", says="step"),
    run("--faults", "kill rank=0 step=soon", "SCRIPT", says="soon"),
    run("--faults", "kill rank=0 step=1 phase=COMPUT", "SCRIPT", says="did you mean 'COMPUTE'"),
    run("SCRIPT", says="did you mean 'ARF'", MS_ENABLE_TFT="{ARG:1}"),
    run("SCRIPT", says="ARF:2", MS_ENABLE_TFT="{ARF:2}"),
    run("SCRIPT", says="'TTP：1' (FULLWIDTH COLON) is wrong; write TTP:1", MS_ENABLE_TFT="{TTP：1}"),
    run("SCRIPT", says="did you mean 'RESILIENT_BEAT_MS'", RESILIENT_BEAT="5"),
    run("SCRIPT", says="RESILIENT_BEAT_MS='soon'", RESILIENT_BEAT_MS="soon"),
    run("SCRIPT", says="RESILIENT_JOIN_TIMEOUT_S must be above 0", RESILIENT_JOIN_TIMEOUT_S="0"),
    run("SCRIPT", says="RESILIENT_TRANSFER='mail'", RESILIENT_TRANSFER="mail"),
    run("SCRIPT", says="HCCL_ASYNC_ERROR_HANDLING", HCCL_ASYNC_ERROR_HANDLING="7"),
    train("reprot", says="No such command"),
    train("report", says="Missing argument"),
    train("report", "nowhere", says="is not a directory"),
    train("report", "EMPTY", says="no events.jsonl"),
    train("report", "--jsn", "EMPTY", says="No such option"),
    train("status", "nowhere", "--limit-s", "0", says="no job is running"),
    train("status", "FILE", says="it is a file"),
    train("inject", says="give a run's directory (or none) and a kind"),
    train("inject", "EMPTY", "kil", says="did you mean 'kill'?"),
    train("inject", "EMPTY", "kill", "--rank", "one", says="Invalid value for '--rank'"),
    train("inject", "nowhere", "kill", "--now", says="there is no such directory"),
    train("inject", "EMPTY", "hcce", "--target", "param", says="only uce has a target"),
    train("verify", "nowhere", says="is not a directory"),
    train("verify", "EMPTY", says="holds no checkpoint"),
    train("demo", "--steps", "0", says="at least 6"),
    train("drill", says="give the script behind --"),
    train("drill", "--", "nowhere.py", says="there is no script 'nowhere.py'"),
    train("drill", "--limit-s", "0", "--", "SCRIPT", says="--limit-s 0: the undisturbed run needs some time"),
    train("drill", "--ranks", "1", "--", "SCRIPT", says="no replica"),
    train("drill", "--kinds", "kill,ucce", "--", "SCRIPT", says="'ucce' is not one of"),
    train("drill", "--run-dir", "FILE", "--", "SCRIPT", says="not an empty directory"),
    train("advise", says="give --stall-s"),
]


def words_of(bad: Bad, places: dict[str, str]) -> list[str]:
    """The command line, with what SCRIPT and the like are."""
    return [places.get(word, word) for word in bad.words]


def complaint(code: int, out: str, err: str, bad: Bad) -> str:
    """What is wrong with an answer; empty if nothing is."""
    mine = [line for line in err.splitlines() if line]
    if code != 2:
        return f"exit code {code}: {out}{err}"
    if out or len(mine) != 1 or not mine[0].startswith(f"{bad.words[0]}: "):
        return f"not one line of ours: {out}{err}"
    return "" if bad.says in mine[0] else f"does not say {bad.says!r}: {mine[0]}"
