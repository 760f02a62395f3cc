; out = softmax of every row of f32; a warp a row, four elements at once, columns a multiple of 128.
; A chosen number of rows stays in dynamic shared memory between the passes.
target triple = "nvptx64-nvidia-cuda"

@row = external addrspace(3) global [0 x float], align 16

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
declare float @llvm.nvvm.ex2.approx.ftz.f(float)
declare float @llvm.nvvm.div.full(float, float)
declare float @llvm.maxnum.f32(float, float)
declare void @llvm.nvvm.bar.warp.sync(i32)

define ptx_kernel void @softmax(ptr addrspace(1) noalias readonly align 16 %in, ptr addrspace(1) noalias align 16 %out, i32 %columns) #0 {
entry:
  %lane = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %start = mul i32 %block, %columns
  %first = shl i32 %lane, 2
  br label %max_loop
max_loop:
  %i = phi i32 [ %first, %entry ], [ %i_next, %max_loop ]
  %m = phi float [ 0xFFF0000000000000, %entry ], [ %m3, %max_loop ]
  %at = add i32 %start, %i
  %at64 = zext i32 %at to i64
  %p = getelementptr float, ptr addrspace(1) %in, i64 %at64
  %v = load <4 x float>, ptr addrspace(1) %p, align 16
  %i64 = zext i32 %i to i64
  %sp = getelementptr float, ptr addrspace(3) @row, i64 %i64
  store <4 x float> %v, ptr addrspace(3) %sp, align 16
  %v0 = extractelement <4 x float> %v, i32 0
  %v1 = extractelement <4 x float> %v, i32 1
  %v2 = extractelement <4 x float> %v, i32 2
  %v3 = extractelement <4 x float> %v, i32 3
  %m0 = call float @llvm.maxnum.f32(float %m, float %v0)
  %m1 = call float @llvm.maxnum.f32(float %m0, float %v1)
  %m2 = call float @llvm.maxnum.f32(float %m1, float %v2)
  %m3 = call float @llvm.maxnum.f32(float %m2, float %v3)
  %i_next = add i32 %i, 128
  %more = icmp ult i32 %i_next, %columns
  br i1 %more, label %max_loop, label %max_done
max_done:
  br label %max_step
max_step:
  %d = phi i32 [ 16, %max_done ], [ %d_next, %max_step ]
  %w = phi float [ %m3, %max_done ], [ %w_next, %max_step ]
  %ws = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %w, i32 %d, i32 31)
  %w_next = call float @llvm.maxnum.f32(float %w, float %ws)
  %d_next = lshr i32 %d, 1
  %d_more = icmp ne i32 %d_next, 0
  br i1 %d_more, label %max_step, label %sum_start
sum_start:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  br label %sum_loop
sum_loop:
  %j = phi i32 [ %lane, %sum_start ], [ %j_next, %sum_loop ]
  %s = phi float [ 0.0, %sum_start ], [ %s_next, %sum_loop ]
  %j64 = zext i32 %j to i64
  %jp = getelementptr float, ptr addrspace(3) @row, i64 %j64
  %x = load float, ptr addrspace(3) %jp
  %xm = fsub float %x, %w_next
  %x2 = fmul float %xm, 0x3FF7154760000000
  %e = call float @llvm.nvvm.ex2.approx.ftz.f(float %x2)
  store float %e, ptr addrspace(3) %jp
  %s_next = fadd float %s, %e
  %j_next = add i32 %j, 32
  %j_more = icmp ult i32 %j_next, %columns
  br i1 %j_more, label %sum_loop, label %sum_done
sum_done:
  br label %sum_step
sum_step:
  %f = phi i32 [ 16, %sum_done ], [ %f_next, %sum_step ]
  %t = phi float [ %s_next, %sum_done ], [ %t_next, %sum_step ]
  %ts = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %t, i32 %f, i32 31)
  %t_next = fadd float %t, %ts
  %f_next = lshr i32 %f, 1
  %f_more = icmp ne i32 %f_next, 0
  br i1 %f_more, label %sum_step, label %out_loop
out_loop:
  %k = phi i32 [ %lane, %sum_step ], [ %k_next, %out_loop ]
  %k64 = zext i32 %k to i64
  %kp = getelementptr float, ptr addrspace(3) @row, i64 %k64
  %y = load float, ptr addrspace(3) %kp
  %q = call float @llvm.nvvm.div.full(float %y, float %t_next)
  %o = add i32 %start, %k
  %o64 = zext i32 %o to i64
  %op = getelementptr float, ptr addrspace(1) %out, i64 %o64
  store float %q, ptr addrspace(1) %op
  %k_next = add i32 %k, 32
  %k_more = icmp ult i32 %k_next, %columns
  br i1 %k_more, label %out_loop, label %end
end:
  ret void
}

attributes #0 = { "nvvm.maxntid"="32,1,1" }
