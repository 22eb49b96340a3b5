"""Groups of scored answers: requested ahead of the trainer, and taken step by step.

    stream.py        `RolloutStream`: requests as many groups as staleness allows; `take` returns a step's groups
    groups_under_way.py  `GroupsUnderWay`: asks them, and decides what becomes of each that ends
    buffer.py        `StalenessBuffer`: which groups may begin, and which a step takes; pure bookkeeping
    outage.py        `Outage`: groups without a reward, and whether the run waits or ends
    pace.py          `Pace`: how far ahead of the trainer to request, within the buffer's bound
    collector.py     `Collector`: a prompt becomes one decoded, scored group; owns the event loop
    environment.py   how a prompt becomes samples: one answer each, or several turns (`RolloutClient`, `Turns`)
    guarded_environment.py  `GuardedEnvironment`: one that fails or hangs costs its group or sample, not the run;
                     `Environments`: which one answers
    router.py        `Router`: sends requests, and again where one fails or its server is silent
    places.py        `Places`: which server a request goes to, and who waits for a free place
    group_call.py    `GroupCall`: what a group's requests need, and the way back; lanes of those that wait
    request_failures.py  `Failures`: where one request has failed, and whether it is sent there again
    silence.py       `SilenceWatch`: which server owes answers and says nothing, while the trainer waits
    held_out.py      answers to held-out sets, for validation and evaluation
    record.py        `RolloutRecord`: what each step was trained on, in compressed files
    replay.py        `Replay`: those files in place of a `RolloutStream`
    teachers/        on-policy distillation: other models' servers score a group's answers
    sampler_check.py  whether each server samples from the policy that is trained
    questions.py     what one that does not is asked; diagnosis.py, the cause that its answers leave

stream -> groups_under_way -> collector -> environment -> router -> engines/. The main thread calls `take`; the rest
runs on one event loop.
"""
