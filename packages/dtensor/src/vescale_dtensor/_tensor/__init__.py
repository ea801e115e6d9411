"""The DTensor itself: its class and methods, how one is made, its gradients, and what hands it on."""
