A=aaaaaaaaaa
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
A=$A$A$A$A$A$A$A$A
python pretrain_gpt.py --num-layers 2 --hidden-size $A --num-attention-heads 4
