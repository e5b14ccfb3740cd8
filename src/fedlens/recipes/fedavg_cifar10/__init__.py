"""Chen, Wen, Zhang and Hao: a report on image classification by FedAvg, on CIFAR-10."""
