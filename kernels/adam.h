/* Adam's arithmetic on one vector, for adam.c and adam_split.c:
 *
 *   g = grad * scale;  add_decay: g += weight_decay * p;  else: p *= decay
 *   m += (1 - beta1) * (g - m)
 *   v  = v * beta2 + ((1 - beta2) * g) * g
 *   p += (-(lr / bc1) * m) / (sqrt(v) / sqrt(bc2) + eps)
 *
 * in fp32, in this order, each operation rounded (offload/optim/reference.py says it in NumPy). */
#ifndef OFFLOAD_ADAM_H
#define OFFLOAD_ADAM_H

#include "vec.h"

typedef struct offload_adam_scalars adam_scalars;

typedef struct {
    vf scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2;
    vf neg_step_size, sqrt_bias_correction2, eps;
} broadcast;

INLINE broadcast broadcast_of(const adam_scalars *s) {
    return (broadcast){vf_set(s->scale), vf_set(s->weight_decay), vf_set(s->decay),
                       vf_set(s->one_minus_beta1), vf_set(s->beta2), vf_set(s->one_minus_beta2),
                       vf_set(s->neg_step_size), vf_set(s->sqrt_bias_correction2), vf_set(s->eps)};
}

INLINE void adam_update(vf *p, vf *m, vf *v, vf grad, const broadcast *c, int add_decay) {
    vf g = vf_mul(grad, c->scale);
    if (add_decay) g = vf_add(g, vf_mul(c->weight_decay, *p));
    else *p = vf_mul(*p, c->decay);
    *m = vf_add(*m, vf_mul(c->one_minus_beta1, vf_sub(g, *m)));
    *v = vf_add(vf_mul(*v, c->beta2), vf_mul(vf_mul(c->one_minus_beta2, g), g));
    vf denominator = vf_add(vf_div(vf_sqrt(*v), c->sqrt_bias_correction2), c->eps);
    *p = vf_add(*p, vf_div(vf_mul(c->neg_step_size, *m), denominator));
}

#endif
