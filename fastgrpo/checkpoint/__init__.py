"""Nothing lost: checkpoints, the choice of what to resume, and the trained model as a folder.

    folders.py    names, completeness, `latest`, retention      disk.py          files that survive a crash
    tensors.py    masters and optimizer <-> DCP shards          random_state.py  random generators
    places.py     do all nodes see one folder?              words.py         between the writer threads of a save
    room.py       room for it on each disk
    saver.py      saving while training goes on                 model.py         the Hugging Face folder
    resume.py     which run to continue, and from where         identity.py      fingerprints of what it is made of
    restore.py    a checkpoint back into the run            amend.py         a metric measured after the save
    others.py     what lies beside the run gone on with
    runs.py       run folders: names, newest, locks         compare.py       why a checkpoint cannot be continued

A part of the run that has state besides masters and optimizer is `Stateful`, and the trainer names it in `stateful`.
"""

from fastgrpo.checkpoint.amend import amend
from fastgrpo.checkpoint.compare import same_rewards
from fastgrpo.checkpoint.folders import Manifest
from fastgrpo.checkpoint.identity import Identity, identify
from fastgrpo.checkpoint.model import save_model, save_trained, trained_bytes
from fastgrpo.checkpoint.others import start_anew, way_on
from fastgrpo.checkpoint.restore import Stateful, restore
from fastgrpo.checkpoint.resume import Start, check_resume, find_start
from fastgrpo.checkpoint.runs import CHECKPOINTS, FINISHED
from fastgrpo.checkpoint.saver import Saver

__all__ = [
    "CHECKPOINTS",
    "FINISHED",
    "Identity",
    "Manifest",
    "Saver",
    "Start",
    "Stateful",
    "amend",
    "check_resume",
    "find_start",
    "identify",
    "restore",
    "same_rewards",
    "save_model",
    "save_trained",
    "start_anew",
    "trained_bytes",
    "way_on",
]
