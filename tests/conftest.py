"""What holds for every test."""

import torch

torch.set_num_threads(1)  # the models are tiny: threads that wait for each other cost ten times what they save
