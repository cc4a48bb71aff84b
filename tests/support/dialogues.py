"""Settings with which the tiny policy has dialogues: a calculator answers each ``=``."""

DIALOGUES = [
    "rollout.stop=['=']",
    "environment={name: calculator, options: {call: '='}, turns: 3, turn_tokens: 8, weights: {calls: 0.25}}",
]
