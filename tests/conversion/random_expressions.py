import random, numpy as np, time, sys
from shardwise.conversion import *
from shardwise.tensors import *
def rand_expr(rng, depth, nleaf):
    """returns (expr, array)"""
    if depth == 0 or rng.random()<0.1:
        nd = rng.randint(0,4) if rng.random()<.9 else 0
        shape = tuple(rng.choice([1,2,3,4,5,6,8]) for _ in range(nd))
        key=f"t{len(nleaf)}"; arr = np.arange(numel(shape)).reshape(shape)+1000000*len(nleaf)
        nleaf[key]=arr
        return Stored(key, shape, DType.F32), arr
    e,a = rand_expr(rng, depth-1, nleaf)
    op = rng.choice(["slice","permute","reshape","concat","stack","chunkcat"])
    if op=="slice" and a.ndim:
        d=rng.randrange(a.ndim); n=a.shape[d]; st=rng.randrange(n) ; step=rng.choice([1,1,2,3]); mx=(n-1-st)//step+1; sz=rng.randint(1,mx)
        idx=[slice(None)]*a.ndim; idx[d]=slice(st,st+step*(sz-1)+1,step)
        return slice_dim(e,d,st,sz,step), a[tuple(idx)]
    if op=="permute":
        p=list(range(a.ndim)); rng.shuffle(p); return permute(e,p), a.transpose(p)
    if op=="reshape":
        n=a.size; dims=[]
        while n>1 and len(dims)<4:
            divs=[d for d in range(1,n+1) if n%d==0]; d=rng.choice(divs); dims.append(d); n//=d
        if n>1 or not dims: dims.append(n)
        rng.shuffle(dims)
        if a.size==1 and rng.random()<.3: dims=[]
        return reshape(e,dims), a.reshape(dims)
    if op=="concat" and a.ndim:
        d=rng.randrange(a.ndim); parts=[(e,a)]
        for _ in range(rng.randint(1,2)):
            sh=list(a.shape); sh[d]=rng.choice([1,2,3,5]); k=f"t{len(nleaf)}"; arr=np.arange(numel(sh)).reshape(sh)+1000000*len(nleaf); nleaf[k]=arr
            parts.append((Stored(k,tuple(sh),DType.F32),arr))
        rng.shuffle(parts)
        return concat([p[0] for p in parts],d), np.concatenate([p[1] for p in parts],d)
    if op=="stack":
        d=rng.randint(0,a.ndim); parts=[(e,a)]
        for _ in range(rng.randint(0,2)):
            sh=list(a.shape); k=f"t{len(nleaf)}"; arr=np.arange(numel(sh)).reshape(sh)+1000000*len(nleaf); nleaf[k]=arr
            parts.append((Stored(k,tuple(sh),DType.F32),arr))
        rng.shuffle(parts)
        return stack([p[0] for p in parts],d), np.stack([p[1] for p in parts],d)
    if op=="chunkcat" and a.ndim:
        d=rng.randrange(a.ndim); n=a.shape[d]
        if n>1:
            c=rng.randint(1,n-1)
            return concat([slice_dim(e,d,c,n-c),slice_dim(e,d,0,c)],d), np.concatenate([np.take(a,range(c,n),d),np.take(a,range(0,c),d)],d)
    return e,a
def check_expression(seed):
    rng=random.Random(seed); leaves={}
    e,a=rand_expr(rng, rng.randint(1,7), leaves)
    assert e.shape==a.shape
    if a.size>20000: return 0
    off=[];sz=[]
    for n in a.shape:
        s=rng.randint(0,n); t=rng.randint(0,n)
        if rng.random()<.1: off.append(s); sz.append(0)
        else:
            s,t=min(s,t),max(s,t); off.append(s); sz.append(t-s)
    if rng.random()<.3: off=[0]*a.ndim; sz=list(a.shape)
    box=Box(tuple(off),tuple(sz))
    want=a[tuple(slice(o,o+s) for o,s in zip(off,sz))]
    out=np.full(want.size,-1); count=np.zeros(want.size,int)
    cs=copies(e,box)
    for c in cs:
        src=np.lib.stride_tricks.as_strided(np.ascontiguousarray(leaves[c.leaf.key]).reshape(-1)[c.source.offset:], c.source.sizes,[8*s for s in c.source.strides])
        dst=np.lib.stride_tricks.as_strided(out[c.target.offset:], c.target.sizes,[8*s for s in c.target.strides])
        cd=np.lib.stride_tricks.as_strided(count[c.target.offset:], c.target.sizes,[8*s for s in c.target.strides])
        dst[...]=src; cd+=1
    assert (count==1).all(), (seed,e,box)
    assert (out.reshape(want.shape)==want).all(), (seed,e,box)
    return len(cs)
