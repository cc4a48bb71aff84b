KIND=unused
python -m openrlhf.cli.$X --pretrain my/model --port 5100
