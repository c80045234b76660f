"""Every public function on tensors as an operator of torch, in the namespace ``kernelgen``; docs/design/torch.md says how.

``table.py`` lists them, ``forms.py`` says how arguments that a schema cannot hold are passed, ``shapes.py`` what comes out,
``operators.py`` registers all of it, ``recorded.py`` and ``kernels.py`` lead there and back, ``gradients.py`` differentiates,
``written.py`` tells autograd what a call has written to.
"""
