"""On-policy distillation: servers of other models score the tokens that the trained model samples.

    connect.py     at the start: health, length, one model per list of teachers, and the trained model's tokenizer
    teachers.py    one group's scores beside its rewards: which teacher, what happens when one fails
    scorers.py     the requests: token ids in, the log-probability of each answer token out, and the likeliest tokens;
                   one class per engine

`Collector` calls `Teachers` when a group's answers are there. What the scores do to advantages is in
policy/distillation.py. What a teacher is asked never changes it: nothing here sends weights.
"""
