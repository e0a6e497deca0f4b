"""What no field of `Capabilities` can say, by topic: each rule names the engine's own (its id in the tables of facts, the file and line of
megatron-core 0.16.1, Megatron-LM core_v0.16.1 or DeepSpeed 0.19.8) and says in numbers what is wrong. What fields say is derived
(strategy/legality.py)."""
